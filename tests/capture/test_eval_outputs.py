"""How often forwards in evaluation are looked at, and which of them."""

from threading import Thread
from time import perf_counter_ns

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from sonde.capture.eval_outputs import MAX_TOLD, SHARE, Evaluations  # noqa: E402
from torch import nn  # noqa: E402

from sonde.capture.recorder import StepRecorder  # noqa: E402
from sonde.runlog.reader import Run  # noqa: E402
from sonde.runlog.writer import Writer  # noqa: E402


class Output(dict):
    """Knows how often somebody looked inside."""

    def __init__(self, tensor):
        super().__init__(out=tensor)
        self.num_looks = 0

    def items(self):
        self.num_looks += 1
        return super().items()


@pytest.fixture
def journal(tmp_path):
    journal = StepRecorder(Writer(tmp_path, rank=0, world_size=1, manifest={}))
    yield journal
    journal.close()


def always_bad(call, step, only_inf):
    return True


def forward(evaluations, module, output, *, took_ns):
    now = perf_counter_ns()
    evaluations.begins("", module, (), {}, now - took_ns)
    evaluations.ended(module, output, 0, perf_counter_ns())


def test_a_slow_model_is_looked_at_every_time(journal):
    evaluations, output = Evaluations(journal, always_bad), Output(torch.ones(8))
    for _ in range(300):
        forward(evaluations, nn.Identity(), output, took_ns=1_000_000_000)
    assert output.num_looks > 200  # a machine that is busy elsewhere makes one look seem expensive, and the next is left out


def test_a_fast_model_is_looked_at_as_often_as_the_share_allows(journal):
    evaluations, output = Evaluations(journal, always_bad), Output(torch.ones(200_000))
    for _ in range(3000):
        forward(evaluations, nn.Identity(), output, took_ns=1_000)
    assert 1 <= output.num_looks < 1500
    assert SHARE < 0.05


def test_a_part_that_is_called_inside_is_not_looked_at_by_itself(journal):
    evaluations, whole, part = Evaluations(journal, always_bad), nn.Identity(), nn.Identity()
    outer, inner = Output(torch.ones(8)), Output(torch.ones(8))
    evaluations.begins("", whole, (), {}, perf_counter_ns())
    evaluations.begins("", part, (), {}, perf_counter_ns())
    evaluations.ended(part, inner, 0, perf_counter_ns())
    evaluations.ended(whole, outer, 0, perf_counter_ns())
    assert (outer.num_looks, inner.num_looks) == (1, 0)


def test_a_forward_that_was_interrupted_does_not_hide_those_after_the_next_update(journal):
    evaluations, module, output = Evaluations(journal, always_bad), nn.Identity(), Output(torch.ones(8))
    evaluations.begins("", nn.Identity(), (), {}, perf_counter_ns())
    evaluations.clear()
    forward(evaluations, module, output, took_ns=1000)
    assert output.num_looks == 1


def test_another_thread_waits_for_its_turn(journal):
    evaluations, output = Evaluations(journal, always_bad), Output(torch.ones(8))
    evaluations.begins("", nn.Identity(), (), {}, perf_counter_ns())
    other = Thread(target=forward, args=(evaluations, nn.Identity(), output), kwargs={"took_ns": 1000})
    other.start()
    other.join()
    assert output.num_looks == 0


def test_bad_batch_after_bad_batch_is_told_a_few_times(journal, tmp_path):
    evaluations = Evaluations(journal, always_bad)
    for _ in range(3 * MAX_TOLD):
        forward(evaluations, nn.Identity(), torch.full((4,), torch.nan), took_ns=1_000_000_000)
    journal.flush()
    assert len(list(Run(tmp_path).events("nonfinite"))) == MAX_TOLD


def test_whether_an_infinity_is_meant_is_asked_once(journal, tmp_path):
    asked = []

    def on_bad(call, step, only_inf):
        asked.append(only_inf)
        return not only_inf

    evaluations = Evaluations(journal, on_bad)
    for _ in range(5):
        forward(evaluations, nn.Identity(), torch.tensor([1.0, -torch.inf]), took_ns=1_000_000_000)
    assert asked == [True]
    forward(evaluations, nn.Identity(), torch.tensor([torch.nan, -torch.inf]), took_ns=1_000_000_000)
    assert asked == [True, False]
    journal.flush()
    (event,) = Run(tmp_path).events("nonfinite")
    assert (event.data["num_nan"], event.data["num_inf"], event.data["num_elements"]) == (1, 1, 2)
