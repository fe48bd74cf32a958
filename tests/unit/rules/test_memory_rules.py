"""Rules about memory: their three answers."""

from __future__ import annotations

import pytest

from sonde.events import Event, Severity, Step
from sonde.memory_trend import MemoryTrend
from sonde.rules.memory.graph_leak import RULE as graph_leak
from sonde.rules.memory.memory_growth import RULE as memory_growth
from sonde.rules.memory.out_of_memory import RULE as out_of_memory
from sonde.rules.rule import Clear, NotEvaluated
from synthetic_steps import ask

LEAK = {
    "holder": "train() local 'seen' -> list[9] -> Tensor [64, 64]", "cause": "train() local 'seen' keeps 12 tensors of steps 129 to 140.",
    "fix": "Empty it once it was used.", "num_bytes": 12 << 14, "num_tensors": 12, "num_nodes": 0, "per_step_bytes": 16384.0,
}  # fmt: skip
DEATH = {
    "requested": 32 << 20, "shape": "", "phase": "forward", "module": "blocks.2", "module_type": "Block", "source": "train.py:20",
    "text": "return relu(x)", "operands": ["x [512, 16] float32"], "parameters": 77 << 10, "gradients": 0, "optimizer_state": 0,
    "rest": 278 << 20, "in_use": 278 << 20, "limit": 505 << 20, "limit_by": "ulimit -v", "batch_size": 512, "batch_fits": 161,
}  # fmt: skip


def answer(rule, memory=(), events=(), kept=None):
    steps = []
    for number, resident in enumerate(memory):
        scalars = {"rss_mb": resident} | ({"kept_graphs": kept(number)} if kept else {})
        here = tuple(event for event in events if event.step == number)
        steps.append(Step(8 * number, 0, scalars, {}, here, {}))
    return ask(rule, steps)


def growing(rate=1.0, num=60):
    return [300 + rate * number for number in range(num)]


def test_memory_that_grows_to_the_end_with_a_holder_is_found():
    limit = Event("memory_limit", 0, {"num_bytes": 1 << 30, "by": "this machine"})
    (finding,) = answer(memory_growth, growing(), [Event("leaks", 20, {"leaks": [LEAK]}), limit])
    assert finding.severity is Severity.WARNING
    assert "local 'seen'" in finding.cause
    assert "128 KiB per step" in finding.cause
    assert finding.evidence["full_after_steps"] == pytest.approx((1024 - 345) * 8, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"memory_threshold_mb": 310.0}, "memory_threshold_mb=310 allows (310 MiB)"),
        ({"memory_threshold_share": 0.5}, "memory_threshold_share=0.5 allows (310 MiB)"),
        ({"memory_threshold_mb": 900.0, "memory_threshold_share": 0.5}, "memory_threshold_share=0.5"),  # the lower one counts
    ],
)
def test_memory_above_a_threshold_of_the_user_is_found_at_its_first_step(settings, said):
    events = [Event("start", 0, settings), Event("memory_limit", 0, {"num_bytes": 620 << 20, "by": "this machine"})]
    finding, *others = answer(memory_growth, growing(), events)
    assert (finding.severity, finding.step) == (Severity.WARNING, 8 * 11)
    assert said in finding.cause
    assert finding.evidence["most"] == "359 MiB"
    assert len(others) == 1  # it grows, too
    (finding,) = answer(memory_growth, [305.0, 311.0, 306.0], events)  # too few for a trend
    assert finding.step == 8


def test_memory_below_a_threshold_of_the_user_is_clear():
    events = [Event("start", 0, {"memory_threshold_mb": 400.0, "memory_threshold_share": 0.1})]  # the limit is not known
    assert isinstance(answer(memory_growth, [300.0] * 60, events), Clear)


def test_memory_that_grows_without_a_pile_of_tensors_is_only_mentioned():
    (finding,) = answer(memory_growth, growing(), [Event("leaks", 20, {"leaks": []})])
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "memory",
    [
        [300.0] * 60,
        [300 + min(number, 25) * 4 for number in range(60)],  # a cache that fills once
        [300 + 200 * (1 - 0.9**number) for number in range(60)],  # ever slower
        [300 + 60 * ((number * 7) % 5) for number in range(60)],  # batches of different lengths
        [300 + 0.2 * number for number in range(60)],  # a few MiB: loggers, caches of code
        [300 + 3 * (number % 20) for number in range(60)],  # emptied after every epoch
        [300 + (200 if number > 50 else 0) for number in range(60)],  # one large validation
        [500 - 2 * number for number in range(60)],
    ],
    ids=["flat", "cache", "slower", "lengths", "little", "epochs", "once", "falls"],
)
def test_memory_that_does_not_grow_for_good_is_clear(memory):
    assert answer(memory_growth, memory, [Event("leaks", 20, {"leaks": [LEAK]})]) == Clear()


def test_a_few_points_are_no_trend():
    assert isinstance(answer(memory_growth, growing(num=5)), NotEvaluated)


def test_a_graph_that_is_kept_is_found_by_its_holder():
    leak = LEAK | {"num_nodes": 1260, "fix": "Keep loss.item()."}
    (finding,) = answer(graph_leak, growing(0), [Event("leaks", 20, {"leaks": [leak]})], kept=float)
    assert (finding.severity, finding.step) == (Severity.WARNING, 20)
    assert finding.fix == "Keep loss.item()"
    assert finding.evidence["graph_nodes"] == 1260


def test_graphs_without_a_holder_that_lasts_are_clear():
    assert answer(graph_leak, growing(0), [Event("leaks", 20, {"leaks": []})], kept=float) == Clear()
    assert answer(graph_leak, growing(0), [Event("leaks", 20, {"leaks": [LEAK]})], kept=lambda number: 0.0) == Clear()
    assert isinstance(answer(graph_leak, growing(0, 4), kept=lambda number: 0.0), NotEvaluated)


def test_the_first_leak_that_keeps_graphs_is_the_graph_leak_and_the_first_of_all_the_growth():
    graphs = LEAK | {"num_nodes": 9, "holder": "the list of losses"}
    events = [Event("leaks", 20, {"leaks": [LEAK, LEAK]}), Event("leaks", 30, {"leaks": [LEAK, graphs]})]
    (graph_finding,), (growth_finding,) = (answer(rule, growing(), events, kept=float) for rule in (graph_leak, memory_growth))
    assert (graph_finding.step, graph_finding.evidence["holder"]) == (30, "the list of losses")
    assert graph_finding.evidence["graphs_alive"] == 59
    assert (growth_finding.step, growth_finding.evidence["holder"]) == (20, LEAK["holder"])


def test_a_leak_with_cells_of_the_wrong_type_does_no_harm():
    leak = {"holder": 5, "cause": None, "num_bytes": "many", "num_nodes": 3}
    (finding,) = answer(graph_leak, growing(0), [Event("leaks", 20, {"leaks": [leak]})])
    assert (finding.evidence["holder"], finding.evidence["kept"]) == ("", "0 bytes")


def test_a_death_is_told_with_what_had_filled_the_memory_and_what_would_fit():
    (finding,) = answer(out_of_memory, growing(0, 3), [Event("out_of_memory", 2, DEATH)])
    assert (finding.severity, finding.where, finding.step) == (Severity.CRITICAL, "blocks.2", 2)
    assert "32 MiB more were asked for while 278 MiB were in use" in finding.cause
    assert "at most about 161 instead of 512" in finding.fix


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requested": 6 << 30}, "larger than all of the memory"),
        ({"phase": "optimizer"}, "less state"),
        ({"phase": "data"}, "in pieces"),
        ({"batch_fits": 0}, "not even a batch of 1"),
        ({"batch_fits": None}, "sonde memory"),
    ],
    ids=["shape", "optimizer", "data", "none", "unknown"],
)
def test_the_advice_fits_the_place(change, said):
    (finding,) = answer(out_of_memory, growing(0, 3), [Event("out_of_memory", 2, DEATH | change)])
    assert said in finding.fix


def test_a_damaged_event_does_no_harm():
    (finding,) = answer(out_of_memory, growing(0, 3), [Event("out_of_memory", 2, {})])
    assert "memory ran out" in finding.cause
    damaged = [Event("leaks", 2, {"leaks": "no"}), Event("memory_limit", 2, {"num_bytes": "x"})]
    assert answer(memory_growth, [300.0] * 20, damaged) == Clear()


def test_a_training_that_lives_is_clear_and_none_is_not_evaluated():
    assert answer(out_of_memory, growing(0, 3)) == Clear()
    assert isinstance(answer(out_of_memory), NotEvaluated)


def test_growth_is_bounded_over_a_million_steps():
    growth = MemoryTrend()
    for step in range(100_000):
        growth.update(step, 100 + step * 1e-3)
    assert growth.num_points <= 256
    trend = growth.trend(24)
    assert trend is not None
    assert trend.per_step == pytest.approx(1e-3, rel=0.05)
