"""Leaks are found with their owner; healthy programs that look similar get no report."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import leak_programs  # noqa: E402
from sonde.leaks.accumulated_tensors import Leak  # noqa: E402
from sonde.leaks.leak_detector import LeakDetector, _grows_steadily  # noqa: E402

pytestmark = pytest.mark.torch


def detect(program, num_steps: int) -> list[Leak]:
    """The leaks at the last step, while the program still runs."""
    gc.collect()
    detector = LeakDetector()
    found: list[Leak] = []
    left = num_steps

    def step() -> None:
        nonlocal left
        detector.step()
        left -= 1
        if not left:
            found.extend(detector.leaks())

    program(num_steps, step)
    return found


@pytest.mark.parametrize("num_steps", [24])
@pytest.mark.parametrize("program", leak_programs.LEAKING, ids=lambda program: program.__name__)
def test_a_leak_is_found_and_its_owner_is_named(program, num_steps, request):
    if program is leak_programs.global_dict_of_batches:
        request.getfixturevalue("unfrozen")
    (leak,) = detect(program, num_steps)
    assert leak.holder.startswith(leak_programs.LEAKING[program])
    assert leak.num_tensors >= num_steps // 3 - 2 or leak.num_nodes >= num_steps


@pytest.mark.parametrize("num_steps", [24])
@pytest.mark.parametrize("program", leak_programs.HEALTHY, ids=lambda program: program.__name__)
def test_a_healthy_program_gets_no_report(program, num_steps):
    assert detect(program, num_steps) == []


def test_freeing_tensors_from_before_the_training_hides_no_leak():
    before = [torch.randn(64) for _ in range(40)]  # of the same kind as the tensors that leak

    def program(num_steps, step):
        def step_and_free():
            if len(before) > 2:
                del before[:2]
            step()

        leak_programs.small_views_of_large_batches(num_steps, step_and_free)

    (leak,) = detect(program, 24)
    assert leak.num_tensors == 22


@pytest.mark.usefixtures("unfrozen")
def test_a_leak_counts_the_tensors_and_bytes_of_its_container():
    (leak,) = detect(leak_programs.global_dict_of_batches, 30)
    assert leak.num_tensors == 28  # all but those of the last two steps
    assert leak.num_bytes == 28 * 64 * 64 * 4
    assert leak.per_step_bytes == 64 * 64 * 4
    assert (leak.first_step, leak.last_step, leak.num_nodes) == (0, 27, 0)
    assert "keeps 28 tensors (448 KiB) of steps 0 to 27" in str(leak)


def test_a_view_counts_with_its_whole_storage():
    (leak,) = detect(leak_programs.small_views_of_large_batches, 20)
    assert leak.num_bytes == 18 * 64 * 64 * 4


def test_activations_that_a_graph_saved_count_for_the_variable_that_holds_the_graph():
    (leak,) = detect(leak_programs.total_without_backward, 20)
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

    assert {leak.chain.container for leak in detect(both, 20)} == {"both() local 'outputs' -> list", "both() local 'batches' -> list"}


def test_a_leak_beside_a_full_buffer_is_the_only_one_reported():
    def mixed(num_steps, step):
        outputs, recent = [], []
        net = leak_programs.model()
        for _ in range(num_steps):
            outputs.append(net(leak_programs.batch()))
            recent.append(torch.randn(64, 64))
            del recent[:-5]
            step()

    assert [leak.chain.container for leak in detect(mixed, 24)] == ["mixed() local 'outputs' -> list"]


def test_too_few_steps_are_no_trend():
    assert detect(leak_programs.list_of_outputs, 6) == []


def test_the_detector_keeps_no_tensor_alive():
    detector = LeakDetector()
    tensor = torch.randn(3)
    alive = weakref.ref(tensor)
    for _ in range(12):
        detector.step()
    detector.leaks()
    del tensor
    assert alive() is None


@pytest.mark.usefixtures("unfrozen")
def test_leaks_of_long_trainings_are_found_from_fewer_records(monkeypatch):
    monkeypatch.setattr("sonde.leaks.leak_detector.MAX_RECORDS", 16)
    (leak,) = detect(leak_programs.global_dict_of_batches, 100)
    assert leak.holder.startswith("leak_programs global 'GLOBAL_CACHE' -> dict[")
    assert detect(leak_programs.full_buffer, 100) == []


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (list(range(10, 210, 10)), True),
        ([10] * 20, False),
        ([10] * 10 + [90] * 10, False),
        ([10, 20, 30, 40] * 5, False),
        ([10 * 2 ** min(i, 4) for i in range(20)], False),
        ([min(10_000 * i, 50_000) for i in range(20)], False),  # reaches the limit in too few steps for a trend
        ([min(4_000 * i, 50_000) for i in range(20)], True),
    ],
)
def test_only_steady_growth_of_a_graph_counts(sizes, expected):
    assert _grows_steadily(sizes) is expected
