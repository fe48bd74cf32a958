"""How often forwards in evaluation are checked, and which of them."""

from threading import Thread
from time import perf_counter_ns

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.capture.probes.nonfinite_eval_outputs import MAX_RECORDED, SHARE, EvalOutputProbe  # noqa: E402
from step_trackers import new_tracker  # noqa: E402


class Output(dict):
    """Counts how often somebody reads it."""

    def __init__(self, tensor):
        super().__init__(out=tensor)
        self.num_reads = 0

    def items(self):
        self.num_reads += 1
        return super().items()


class Evaluation:
    """An EvalOutputProbe, called as the step tracker calls it; each forward takes as long as a test wants."""

    def __init__(self, folder, confirm=lambda incident: True):
        self.tracker = new_tracker(folder)
        self.timer, self.probe = self.tracker.timer, self.tracker.probe(EvalOutputProbe)
        self.incidents, self.confirm = [], confirm

    def start(self, module, *, took_ns=0):
        self.timer.entered_ns = perf_counter_ns() - took_ns
        self.probe.on_eval_forward_start(module, (), {})

    def end(self, module, output):
        self.timer.entered_ns = perf_counter_ns()
        incident = self.probe.on_eval_forward_end(module, output)
        if incident is not None:
            self.incidents.append(incident)
            self.probe.on_incident(incident, self.confirm(incident))

    def forward(self, module, output, *, took_ns):
        self.start(module, took_ns=took_ns)
        self.end(module, output)


@pytest.fixture
def evaluation(tmp_path):
    evaluation = Evaluation(tmp_path)
    yield evaluation
    evaluation.tracker.recorder.writer.close()


def test_a_slow_model_is_checked_every_time(evaluation):
    output = Output(torch.ones(8))
    for _ in range(300):
        evaluation.forward(nn.Identity(), output, took_ns=1_000_000_000)
    assert output.num_reads > 200  # a machine that is busy elsewhere makes one check seem expensive, and the next is left out


def test_a_fast_model_is_checked_as_often_as_the_share_allows(evaluation):
    output = Output(torch.ones(200_000))
    for _ in range(3000):
        evaluation.forward(nn.Identity(), output, took_ns=1_000)
    assert 1 <= output.num_reads < 1500
    assert SHARE < 0.05


def test_a_part_that_is_called_inside_is_not_checked_by_itself(evaluation):
    whole, part = nn.Identity(), nn.Identity()
    outer, inner = Output(torch.ones(8)), Output(torch.ones(8))
    evaluation.start(whole)
    evaluation.start(part)
    evaluation.end(part, inner)
    evaluation.end(whole, outer)
    assert (outer.num_reads, inner.num_reads) == (1, 0)


def test_a_forward_that_was_interrupted_does_not_hide_those_after_the_next_update(evaluation):
    output = Output(torch.ones(8))
    evaluation.start(nn.Identity())
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    evaluation.tracker.on_optimizer_step_start(optimizer, False)
    evaluation.tracker.on_optimizer_step_end(optimizer)
    assert evaluation.tracker.boundaries.number == 1
    evaluation.forward(nn.Identity(), output, took_ns=1000)
    assert output.num_reads == 1


def test_another_thread_waits_for_its_turn(evaluation):
    output = Output(torch.ones(8))
    evaluation.start(nn.Identity())
    other = Thread(target=evaluation.forward, args=(nn.Identity(), output), kwargs={"took_ns": 1000})
    other.start()
    other.join()
    assert output.num_reads == 0


def test_bad_batch_after_bad_batch_is_reported_a_few_times(evaluation):
    for _ in range(3 * MAX_RECORDED):
        evaluation.forward(nn.Identity(), torch.full((4,), torch.nan), took_ns=1_000_000_000)
    assert len(evaluation.incidents) == MAX_RECORDED


def test_whether_an_infinity_is_meant_is_asked_once(evaluation):
    evaluation.confirm = lambda incident: not incident.is_only_inf
    for _ in range(5):
        evaluation.forward(nn.Identity(), torch.tensor([1.0, -torch.inf]), took_ns=1_000_000_000)
    assert [incident.is_only_inf for incident in evaluation.incidents] == [True]
    evaluation.forward(nn.Identity(), torch.tensor([torch.nan, -torch.inf]), took_ns=1_000_000_000)
    assert [incident.is_only_inf for incident in evaluation.incidents] == [True, False]
    event = evaluation.incidents[-1].event
    assert (event.num_nan, event.num_inf, event.num_elements) == (1, 1, 2)


@pytest.mark.parametrize(("handled", "num"), [(False, 0), (True, 1), (None, 0)], ids=["meant", "bad", "nobody decides"])
def test_an_infinity_is_recorded_only_where_a_handler_confirms_it(tmp_path, handled, num):
    model = nn.Identity()
    tracker = new_tracker(tmp_path, make_handlers=lambda: [lambda incident: handled])
    tracker.models.watch(model, "model", 0)
    with torch.no_grad():
        tracker.on_forward_start(model, (), {})
        tracker.on_forward_end(model, torch.tensor([1.0, -torch.inf]))
    tracker.models.close()
    tracker.recorder.flush()
    tracker.recorder.writer.close()
    assert len(list(sonde.Run(tmp_path).events("nonfinite"))) == num
