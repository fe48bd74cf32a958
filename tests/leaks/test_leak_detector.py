"""Leaks are found and their holder is named; programs that only look as if they leaked get no report."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
import leak_programs  # noqa: E402

from sonde.leaks.leak_detector import Leak, LeakDetector, _grows_steadily  # noqa: E402

pytestmark = pytest.mark.torch


def watched(program, num_steps: int) -> list[Leak]:
    """What the watch says at the last step, while the program still runs."""
    gc.collect()
    watch = LeakDetector()
    found: list[Leak] = []
    left = num_steps

    def step() -> None:
        nonlocal left
        watch.step()
        left -= 1
        if not left:
            found.extend(watch.leaks())

    program(num_steps, step)
    return found


@pytest.mark.parametrize("num_steps", [24])
@pytest.mark.parametrize("program", leak_programs.LEAKING, ids=lambda program: program.__name__)
def test_a_leak_is_found_and_its_holder_is_named(program, num_steps, request):
    if program is leak_programs.global_dict_of_batches:
        request.getfixturevalue("unfrozen")
    (leak,) = watched(program, num_steps)
    assert leak.holder.startswith(leak_programs.LEAKING[program])
    assert leak.num_tensors >= num_steps // 3 - 2 or leak.num_nodes >= num_steps


@pytest.mark.parametrize("num_steps", [24])
@pytest.mark.parametrize("program", leak_programs.HEALTHY, ids=lambda program: program.__name__)
def test_a_healthy_program_gets_no_report(program, num_steps):
    assert watched(program, num_steps) == []


def test_what_was_there_before_the_training_hides_no_leak_by_going():
    before = [torch.randn(64) for _ in range(40)]  # of the same kind as what leaks

    def program(num_steps, step):
        def step_and_forget():
            if len(before) > 2:
                del before[:2]
            step()

        leak_programs.small_views_of_large_batches(num_steps, step_and_forget)

    (leak,) = watched(program, 24)
    assert leak.num_tensors == 22


@pytest.mark.usefixtures("unfrozen")
def test_the_numbers_of_a_leak_are_those_of_the_pile():
    (leak,) = watched(leak_programs.global_dict_of_batches, 30)
    assert leak.num_tensors == 28  # all but those of the last two steps
    assert leak.num_bytes == 28 * 64 * 64 * 4
    assert leak.per_step_bytes == 64 * 64 * 4
    assert (leak.first_step, leak.last_step, leak.num_nodes) == (0, 27, 0)
    assert "keeps 28 tensors (448 KiB) of steps 0 to 27" in str(leak)


def test_a_view_counts_with_the_storage_that_it_keeps():
    (leak,) = watched(leak_programs.small_views_of_large_batches, 20)
    assert leak.num_bytes == 18 * 64 * 64 * 4


def test_activations_that_a_kept_graph_has_saved_count_for_the_variable_that_holds_the_graph():
    (leak,) = watched(leak_programs.total_without_backward, 20)
    assert leak.chain.through_graph
    assert leak.num_tensors >= 18
    assert "total += loss.item()" in leak.fix


def test_two_leaks_at_once_are_both_named():
    def both(num_steps, step):
        outputs, batches = [], []
        net = leak_programs.model()
        for _ in range(num_steps):
            outputs.append(net(leak_programs.batch()))
            batches.append(torch.randn(64, 64))
            step()

    assert {leak.chain.place for leak in watched(both, 20)} == {"both() local 'outputs' -> list", "both() local 'batches' -> list"}


def test_a_leak_beside_a_full_buffer_is_the_only_one_that_is_named():
    def mixed(num_steps, step):
        outputs, recent = [], []
        net = leak_programs.model()
        for _ in range(num_steps):
            outputs.append(net(leak_programs.batch()))
            recent.append(torch.randn(64, 64))
            del recent[:-5]
            step()

    assert [leak.chain.place for leak in watched(mixed, 24)] == ["mixed() local 'outputs' -> list"]


def test_too_few_steps_are_no_trend():
    assert watched(leak_programs.list_of_outputs, 6) == []


def test_the_watch_itself_keeps_nothing_alive():
    watch = LeakDetector()
    tensor = torch.randn(3)
    alive = weakref.ref(tensor)
    for _ in range(12):
        watch.step()
    watch.leaks()
    del tensor
    assert alive() is None


@pytest.mark.usefixtures("unfrozen")
def test_long_trainings_are_looked_at_less_and_less_often(monkeypatch):
    monkeypatch.setattr("sonde.leaks.leak_detector.MAX_RECORDS", 16)
    (leak,) = watched(leak_programs.global_dict_of_batches, 100)
    assert leak.holder.startswith("leak_programs global 'GLOBAL_CACHE' -> dict[")
    assert watched(leak_programs.full_buffer, 100) == []


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (list(range(10, 210, 10)), True),
        ([10] * 20, False),
        ([10] * 10 + [90] * 10, False),
        ([10, 20, 30, 40] * 5, False),
        ([10 * 2 ** min(i, 4) for i in range(20)], False),
        ([min(10_000 * i, 50_000) for i in range(20)], False),  # counted to its end in too few steps to tell
        ([min(4_000 * i, 50_000) for i in range(20)], True),
    ],
)
def test_a_graph_grows_steadily_or_not(sizes, expected):
    assert _grows_steadily(sizes) is expected
