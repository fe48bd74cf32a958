"""The rules about speed: what they find, what they leave alone, when they say that they cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sonde.events import EXPONENT_FIELDS, Event, Finding, Frame, Kind, Severity, Step
from sonde.rules.rule import Clear
from sonde.rules.speed.checkpoint_stall import RULE as checkpoint_stall
from sonde.rules.speed.cpu_oversubscribed import RULE as cpu_oversubscribed
from sonde.rules.speed.host_sync import RULE as host_sync
from sonde.rules.speed.input_bound import RULE as input_bound
from sonde.rules.speed.python_bound import RULE as python_bound
from sonde.rules.speed.slow_layer import RULE as slow_layer
from sonde.rules.speed.slow_step_outliers import RULE as slow_step_outliers
from sonde.rules.speed.unfused_optimizer import RULE as unfused_optimizer
from sonde.rules.speed.validation_dominates import RULE as validation_dominates
from synthetic_steps import OUTPUT_IDS, ask, the_finding, training, why_not, xray

ALL = (
    input_bound, validation_dominates, checkpoint_stall, host_sync, unfused_optimizer, python_bound, slow_layer, slow_step_outliers,
    cpu_oversubscribed,
)  # fmt: skip
HEALTHY_LINES = xray(0).data["lines"]
HEALTHY_LAYERS = xray(0).data["layers"]


def timed(times: Callable[[int], Mapping[str, float]], *, num_steps: int = 100, **looked: Any) -> list[Step]:
    """Steps whose phases take so long, in ms. `looked`: fields of the profiles of two steps, in place of ordinary ones."""

    def scalars(step: int) -> dict[str, float]:
        phases = {"data": 0.4, "forward": 3.0, "backward": 5.0, "optimizer": 0.5, "validation": 0.0, "checkpoint": 0.0, "other": 1.0}
        phases |= times(step)
        return {f"{phase}_ms": ms for phase, ms in phases.items()} | {"step_ms": sum(phases.values()) + 0.1}

    events = {step: [xray(step, **looked)] for step in (21, 61)} if looked else {}
    steps = training(num_steps, scalars=scalars, events=events)
    if looked:  # in place of the healthy ones
        steps = [_without(step) if step.number in (20, 60) else step for step in steps]
    return steps


def _without(step: Step) -> Step:
    events = tuple(event for event in step.events if event.kind != "xray")
    return Step(step.number, step.rank, step.scalars, step.frames, events, step.sites)


def with_event(steps: list[Step], event: Event) -> list[Step]:
    first = steps[0]
    return [Step(0, 0, first.scalars, first.frames, (*first.events, event), first.sites), *steps[1:]]


def line(text: str, num: int, ms: float, *, name: str = "train.py:30", function: str = "main") -> dict[str, Any]:
    return {"line": name, "text": text, "function": function, "num": num, "ms": ms}


# -- of all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_a_balanced_training_is_clear(rule):
    assert ask(rule, timed(lambda step: {})) == Clear()


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_a_short_training_is_not_judged(rule):
    assert "fewer than 25 settled steps" in why_not(rule, timed(lambda step: {"data": 500.0}, num_steps=20))


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_a_run_of_an_older_version_without_times_is_not_judged(rule):
    old = [Step(step.number, 0, {"loss": 1.0}, {}, (), step.sites) for step in training(60)]
    assert why_not(rule, old) == "the run holds no times"


@pytest.mark.parametrize("rule", [host_sync, python_bound, slow_layer, cpu_oversubscribed], ids=lambda rule: rule.name)
def test_without_profiled_steps_some_cannot_tell(rule):
    assert "profiled" in why_not(rule, [_without(step) for step in timed(lambda step: {})])


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "odd",
    [
        {"lines": [{"ms": "x"}, 3], "waits": {"a": 1}, "layers": None, "machine": 7, "fetch_ms": None},
        {"lines": [{"ms": "x"}, {}], "waits": [{}, {"num": "many"}], "layers": [{"elements": 1, "path": 7}, {}], "machine": {"cores": "x"}},
    ],
    ids=["unreadable", "odd cells"],
)
def test_damaged_events_are_no_reason_to_fail(rule, odd):
    assert not isinstance(ask(rule, timed(lambda step: {}, **odd)), list)


def test_steps_of_a_tiny_model_are_not_spoken_of_unless_the_run_is_long():
    tiny = {"data": 1.0, "forward": 0.2, "backward": 0.3, "optimizer": 0.1, "other": 0.1}
    waits = {"fetch_ms": 1.0, "fetch_cpu_ms": 0.1}
    assert ask(input_bound, timed(lambda step: tiny, num_steps=800, **waits)) == Clear()
    hours = {phase: 100 * ms for phase, ms in tiny.items()}  # as long as 80,000 of them
    assert the_finding(input_bound, timed(lambda step: hours, num_steps=800, **waits)).evidence["gain"] > 0.2


def test_on_a_crowded_machine_long_steps_may_be_short_ones():
    crowded = {"machine": {"threads": 1, "cores": 2.0, "load": 9.0, "cpu_share": 0.1, "pushed_off_per_s": 150.0}}
    adam = Event("optimizer", 0, {"class": "Adam", "groups": [{"num_parameters": 6, "fused": None, "device": "cpu"}]})
    steps = [_only_optimizer(step, adam) for step in timed(lambda step: {"optimizer": 12.0})]
    assert the_finding(unfused_optimizer, steps)
    assert ask(unfused_optimizer, [_only_optimizer(step, adam) for step in timed(lambda step: {"optimizer": 12.0}, **crowded)]) == Clear()


def _only_optimizer(step: Step, optimizer: Event) -> Step:
    """The run of `synthetic_steps` made its optimizer before Sonde noted such things."""
    events = tuple(event for event in step.events if event.kind != "optimizer")
    return Step(step.number, 0, step.scalars, step.frames, (*events, optimizer) if step.number == 0 else events, step.sites)


# -- one by one ------------------------------------------------------------------------------------

LOADER = {"call": "loader", "line": "train.py:14", "text": "for x, y in loader:", "num_workers": 0, "batch_size": 32}


def test_waiting_for_data_is_input_bound_and_says_how_many_workers_and_what_they_gain():
    steps = timed(lambda step: {"data": 14.0}, fetch_ms=14.0, fetch_cpu_ms=1.0)
    finding = the_finding(input_bound, with_event(steps, Event("source", 0, LOADER)))
    assert finding.severity is Severity.WARNING
    assert finding.evidence["source"] == "train.py:14"
    assert finding.evidence["wanted_workers"] == 2
    assert "num_workers=2" in finding.fix
    assert 0.4 < finding.evidence["gain"] < 0.6  # 23.5 ms become 9.5


def test_loading_that_computes_gains_no_more_than_the_cores_that_are_left():
    busy = {"machine": {"threads": 1, "cores": 1.0}, "fetch_ms": 30.0, "fetch_cpu_ms": 30.0}
    one_core = ask(input_bound, with_event(timed(lambda step: {"data": 30.0}, **busy), Event("source", 0, LOADER)))
    two = {"machine": {"threads": 1, "cores": 2.0}, "fetch_ms": 30.0, "fetch_cpu_ms": 30.0}
    two_cores = the_finding(input_bound, with_event(timed(lambda step: {"data": 30.0}, **two), Event("source", 0, LOADER)))
    assert two_cores.evidence["wanted_workers"] == 1
    assert two_cores.evidence["gain"] < 0.25  # 39.5 ms become 30
    assert one_core == Clear()


def test_workers_that_are_started_anew_in_every_epoch_are_to_be_kept():
    steps = timed(lambda step: {"data": 200.0 if step % 20 == 0 else 0.2}, fetch_ms=0.2, fetch_cpu_ms=0.1)
    finding = the_finding(input_bound, with_event(steps, Event("source", 0, LOADER | {"num_workers": 2})))
    assert "persistent_workers=True" in finding.fix


def test_validation_that_takes_most_of_the_time_is_said_with_how_much_rarer_it_should_be():
    def scalars(step: int) -> dict[str, float]:
        return {"validation": 60.0} if step % 4 == 0 else {}

    finding = the_finding(validation_dominates, timed(scalars))
    assert finding.evidence["steps_between"] == pytest.approx(4, rel=0.1)
    assert finding.evidence["times_less_often"] == 14
    assert finding.evidence["gain"] == pytest.approx(0.56, abs=0.04)


def test_a_target_network_in_every_step_is_not_validation():
    assert ask(validation_dominates, timed(lambda step: {"validation": 12.0})) == Clear()


def test_checkpoints_that_stall_the_training_are_said():
    finding = the_finding(checkpoint_stall, timed(lambda step: {"checkpoint": 40.0} if step % 5 == 0 else {}))
    assert finding.severity is Severity.WARNING
    assert finding.evidence["checkpoint_share"] == pytest.approx(0.45, abs=0.05)


def test_one_checkpoint_stalls_nothing():
    assert ask(checkpoint_stall, timed(lambda step: {"checkpoint": 4000.0} if step == 90 else {})) == Clear()


def optimizer(kind: str = "Adam", **group: Any) -> Event:
    groups = [{"lr": 1e-3, "num_parameters": 40, "fused": None, "foreach": None, "momentum": 0.0, "device": "cpu"} | group]
    return Event("optimizer", 0, {"optimizer": 0, "class": kind, "groups": groups, "source": "train.py:9", "text": "opt = Adam(…)"})


def stepping(event: Event, ms: float = 12.0) -> list[Step]:
    return [_only_optimizer(step, event) for step in timed(lambda step: {"optimizer": ms})]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad"])
def test_a_plain_optimizer_that_takes_half_of_the_time_is_to_be_fused(kind):
    finding = the_finding(unfused_optimizer, stepping(optimizer(kind)))
    gain = f"{100 * finding.evidence['gain']:.0f} %"
    assert finding.fix == f"pass fused=True: torch.optim.{kind}(..., fused=True); that should save about {gain} of the time"
    assert finding.evidence["source"] == "train.py:9"
    assert finding.evidence["gain"] > 0.2


@pytest.mark.parametrize(
    "event",
    [optimizer(fused=True), optimizer("SGD"), optimizer("RMSprop"), optimizer(device="cuda")],
    ids=["fused", "SGD without momentum", "no fused form", "on a device"],
)
def test_an_optimizer_that_has_nothing_to_gain_is_left_alone(event):
    assert ask(unfused_optimizer, stepping(event)) == Clear()


def test_an_optimizer_that_takes_little_is_left_alone():
    assert ask(unfused_optimizer, stepping(optimizer(), ms=0.8)) == Clear()


def test_a_loop_of_many_small_pieces_is_python_bound_with_its_line():
    lines = [*HEALTHY_LINES, line("out[i] = roll(x[i])", 256, 12.0, function="shift"), line("for i in …", 257, 1.0, function="shift")]
    finding = the_finding(python_bound, timed(lambda step: {"other": 13.0}, lines=lines))
    assert finding.evidence["source"] == "train.py:30"
    assert finding.evidence["loop_share"] == pytest.approx(13 / 21.5)
    assert "shift" in finding.cause


@pytest.mark.parametrize(
    "piece", [line("x = layer(x)", 24, 12.0), line("out = expert(x)", 64, 12.0)], ids=["over layers", "with real work in it"]
)
def test_a_loop_with_work_in_it_is_not_python_bound(piece):
    assert ask(python_bound, timed(lambda step: {}, lines=[*HEALTHY_LINES, piece])) == Clear()


def test_a_number_per_element_is_host_sync_and_not_python_bound_too():
    looked = {
        "lines": [*HEALTHY_LINES, line("hits += p[i].item()", 512, 8.0)],
        "waits": [{"line": "train.py:30", "text": "hits += p[i].item()", "call": ".item()", "num": 512, "ms": 0.4}],
    }
    finding = the_finding(host_sync, timed(lambda step: {"other": 8.0}, **looked))
    assert finding.evidence["source"] == "train.py:30"
    assert finding.evidence["calls_per_step"] == 512
    assert finding.evidence["gain"] == pytest.approx(0.8 * 8 / 16.5)
    assert ask(python_bound, timed(lambda step: {"other": 8.0}, **looked)) == Clear()


def test_a_rollout_is_not_told_to_be_one_operation():
    loop = [line("d = Categorical(logits=policy(s))", 100, 7.0), line("s, r, done = env.step(a)", 100, 4.0, name="train.py:31")]
    lines = [*HEALTHY_LINES, *loop]
    waits = [{"line": "train.py:32", "text": "a = d.sample().item()", "call": ".item()", "num": 100, "ms": 0.1}]

    def finding(forwards, waits):
        steps = timed(lambda step: {"other": 11.0}, lines=lines, waits=waits)
        return the_finding(python_bound, [replace(step, scalars={**step.scalars, "forwards": forwards}) for step in steps])

    rollout = finding(100.0, waits)
    assert (rollout.severity, rollout.evidence["model_calls_per_step"]) == (Severity.INFO, 100)
    assert "several environments at once" in rollout.fix
    for other in (finding(1.0, waits), finding(100.0, [])):  # numbers are read in a loop of another kind; a loop over samples
        assert "one operation on the whole tensor" in other.fix


def test_one_loss_item_per_step_is_harmless_even_where_its_line_is_long():
    waits = [{"line": "train.py:19", "text": "loss = f(model(x)).item()", "call": ".item()", "num": 1, "ms": 0.002}]
    assert ask(host_sync, timed(lambda step: {}, lines=HEALTHY_LINES, waits=waits)) == Clear()


def test_a_layer_that_is_far_slower_than_its_peers_is_named_with_the_reason():
    slow = HEALTHY_LAYERS[2] | {"forward_ms": 12.0, "backward_ms": 20.0, "dtype": "float16"}
    lines = [line("out = model(x)", 1, 15.0, name="train.py:19"), line("loss.backward()", 1, 25.0, name="train.py:20")]
    layers = [*HEALTHY_LAYERS[:2], slow, *HEALTHY_LAYERS[3:]]
    finding = the_finding(slow_layer, timed(lambda step: {"forward": 15.0, "backward": 25.0}, layers=layers, lines=lines))
    assert finding.where == HEALTHY_LAYERS[2]["path"]
    assert "float16" in finding.cause
    assert finding.evidence["times_slower"] > 10
    assert finding.evidence["gain"] > 0.4


def test_a_layer_that_is_slow_only_in_backward_is_found_from_whichever_look_has_it():
    lines = [line("out = model(x)", 1, 4.0, name="train.py:19"), line("loss.backward()", 1, 60.0, name="train.py:20")]
    unknown = [*HEALTHY_LAYERS[:2], HEALTHY_LAYERS[2] | {"backward_ms": float("nan")}, *HEALTHY_LAYERS[3:]]
    known = [*HEALTHY_LAYERS[:2], HEALTHY_LAYERS[2] | {"backward_ms": 50.0}, *HEALTHY_LAYERS[3:]]
    steps = timed(lambda step: {"backward": 60.0}, layers=unknown, lines=lines)
    finding = the_finding(slow_layer, with_event(steps, xray(0, layers=known, lines=lines)))
    assert finding.where == HEALTHY_LAYERS[2]["path"]
    assert finding.evidence["backward_ms"] == 50.0
    assert ask(slow_layer, steps) == Clear()


def test_a_layer_is_slow_because_the_output_of_another_one_is_subnormal():
    slow = HEALTHY_LAYERS[2] | {"forward_ms": 12.0, "backward_ms": 20.0}
    lines = [line("out = model(x)", 1, 15.0, name="train.py:19"), line("loss.backward()", 1, 25.0, name="train.py:20")]
    looked = {"layers": [*HEALTHY_LAYERS[:2], slow, *HEALTHY_LAYERS[3:]], "lines": lines}

    def finding_with(**num_subnormal: float) -> Finding:
        steps = timed(lambda step: {"forward": 15.0, "backward": 25.0}, **looked)
        return the_finding(slow_layer, [with_exponents(step, num_subnormal) for step in steps])

    finding = finding_with(**{"net.0": 1.0, "net.2": 60.0})
    assert "60 % of the output of model.net.2 is subnormal" in finding.cause
    assert "set_flush_denormal" in finding.fix
    assert "subnormal" not in finding_with(**{"net.2": 1.0}).cause


def with_exponents(step: Step, num_subnormal: Mapping[str, float]) -> Step:
    """With histograms of the outputs: of a hundred numbers so many are subnormal, in every step another exponent."""
    kind = Kind.ACTIVATION + Kind.EXPONENTS
    if Kind.ACTIVATION not in step.frames:
        return step
    sites = [OUTPUT_IDS[path] for path in num_subnormal for _ in range(2)]
    exponents = [-130.0 - step.number % 3, -2.0] * len(num_subnormal)
    counts = [count for num in num_subnormal.values() for count in (num, 100.0 - num)]
    histogram = Frame(kind, step.number, np.array(sites, np.uint32), EXPONENT_FIELDS, np.array([exponents, counts]))
    return replace(step, frames={**step.frames, kind: histogram})


def test_with_more_threads_than_cores_no_layer_is_blamed():
    slow = [*HEALTHY_LAYERS[:2], HEALTHY_LAYERS[2] | {"forward_ms": 12.0, "backward_ms": 20.0}, *HEALTHY_LAYERS[3:]]
    looked = {"layers": slow, "machine": {"threads": 16, "cores": 2.0}}
    assert "16 threads on 2 cores" in why_not(slow_layer, timed(lambda step: {"forward": 15.0, "backward": 25.0}, **looked))


def test_a_layer_with_more_to_do_is_not_slow():
    big = HEALTHY_LAYERS[2] | {"forward_ms": 12.0, "backward_ms": 20.0, "multiplications": 4e8, "elements": 1e6}
    lines = [line("out = model(x)", 1, 15.0, name="train.py:19"), line("loss.backward()", 1, 25.0, name="train.py:20")]
    layers = [*HEALTHY_LAYERS[:2], big, *HEALTHY_LAYERS[3:]]
    assert ask(slow_layer, timed(lambda step: {"forward": 15.0, "backward": 25.0}, layers=layers, lines=lines)) == Clear()


def test_slow_steps_at_equal_distances_are_found_with_the_phase_and_the_line():
    steps = timed(lambda step: {"other": 80.0} if step % 10 == 3 else {})
    slow = Event("xray", 43, xray(43, why="slow", lines=[*HEALTHY_LINES, line("log(model)", 1, 79.0)]).data)
    steps = [Step(s.number, 0, s.scalars, s.frames, (*s.events, slow) if s.number == 43 else s.events, s.sites) for s in steps]
    finding = the_finding(slow_step_outliers, steps)
    assert finding.evidence["steps_between"] == 10
    assert finding.evidence["phase"] == "other"
    assert finding.evidence["source"] == "train.py:30"
    assert finding.evidence["gain"] == pytest.approx(0.8 * 79 / (99 + 79), abs=0.02)


def test_slow_steps_that_come_as_they_like_are_the_machines():
    chance = {9, 14, 22, 25, 37, 41, 58, 59, 71, 90, 97}
    assert ask(slow_step_outliers, timed(lambda step: {"backward": 90.0} if step in chance else {})) == Clear()


def test_of_a_long_run_the_last_slow_steps_count():
    steps = timed(lambda step: {"other": 150.0} if step % 10 == 0 else {}, num_steps=3000)
    finding = the_finding(slow_step_outliers, steps)
    assert finding.evidence["steps_between"] == 10
    assert finding.evidence["num_slow"] == 256
    assert finding.step == 2990 - 10 * 255


def growing(step: int, *, by_steps: int = 2000) -> float:
    """Milliseconds of a run whose steps become ten times as long."""
    return 10.0 + 90.0 * min(step / by_steps, 1.0)


def test_slow_steps_are_compared_with_the_steps_before_them_if_steps_become_longer():
    slow = timed(lambda step: {"other": growing(step) * (8 if step % 25 == 20 else 1)}, num_steps=2000)
    finding = the_finding(slow_step_outliers, slow)
    # The median of the whole run is 64 ms: compared with that, the slow steps of the beginning (96 ms) would be ordinary ones.
    assert finding.step == 20
    assert finding.evidence["num_slow"] == 80
    assert finding.evidence["steps_between"] == 25


@pytest.mark.parametrize(
    "ms",
    [growing, lambda step: growing(step, by_steps=300), lambda step: 10.0 if step < 400 else 80.0],
    ids=["slowly", "then constant", "at once"],
)
def test_steps_that_become_longer_are_no_outliers(ms):
    assert ask(slow_step_outliers, timed(lambda step: {"other": ms(step)}, num_steps=1500)) == Clear()


def test_more_threads_than_cores_are_too_many():
    machine = {"threads": 16, "cores": 2.0, "load": 2.0, "cpu_share": 1.9, "pushed_off_per_s": 900.0}
    finding = the_finding(cpu_oversubscribed, timed(lambda step: {}, machine=machine))
    assert "torch.set_num_threads(2)" in finding.fix
    assert finding.evidence["gain"] > 0.2


@pytest.mark.parametrize(("threads", "cores"), [(2, 2.0), (1, 0.5), (4, 8.0)])
def test_as_many_threads_as_cores_are_fine(threads, cores):
    assert ask(cpu_oversubscribed, timed(lambda step: {}, machine={"threads": threads, "cores": cores})) == Clear()
