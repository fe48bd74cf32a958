"""Tensors that `model.to(device)` does not take along. The meta device stands for one: it computes nothing, but tensors are on it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.capture.tensors_on_wrong_device import find_left_behind  # noqa: E402
from sonde.events import Event, Severity, Step  # noqa: E402
from sonde.rules.devices.tensor_left_behind import RULE  # noqa: E402
from sonde.rules.rule import Clear, NotEvaluated  # noqa: E402
from sonde.runlog.run_reader import Run  # noqa: E402
from synthetic_steps import ask  # noqa: E402


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.ones(4)
        self.scale = torch.tensor(2.0)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        return self.linear(x) * self.mask.to(x.device) * self.scale + self.shift


def judged(left_behind, *lines):
    events = [Event("source", 0, {"call": "transfer", "line": f"model.py:{i}", "text": text}) for i, text in enumerate(lines)]
    membership = Event("membership", 0, {"left_behind": left_behind} if left_behind else {})
    return ask(RULE, [Step(0, 0, {"loss": 1.0}, {}, (*events, membership), {})])


def test_a_plain_attribute_stays_behind_and_a_buffer_does_not():
    model = nn.Sequential(Masked()).to("meta")
    assert [(row["kind"], row["path"], row["model_on"]) for row in find_left_behind(model)] == [("attribute", "0.mask", "meta")]


def test_nothing_is_left_behind_where_everything_is_on_the_cpu():
    assert find_left_behind(Masked()) == []


def test_parameters_that_stay_on_the_cpu_are_found():
    model = Masked().to("meta")
    model.linear.bias = nn.Parameter(torch.zeros(4))
    assert ("parameter", "linear.bias") in {(row["kind"], row["path"]) for row in find_left_behind(model)}


def test_a_run_records_what_was_left_behind(tmp_path):
    model = Masked().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device="meta")).sum().backward()
            optimizer.step()
    (event,) = Run(tmp_path / "run").events("membership")
    assert [row["path"] for row in event.data["left_behind"]] == ["mask"]


def test_what_a_line_brings_over_each_time_is_a_warning_with_that_line():
    rows = find_left_behind(Masked().to("meta"))
    (finding,) = judged(rows, "x, y = x.to(device), y.to(device)", "return self.linear(x) * self.mask.to(x.device)")
    assert (finding.severity, finding.where, finding.evidence["source"]) == (Severity.WARNING, "mask", "model.py:1")


def test_what_nobody_brings_over_is_only_mentioned():
    (finding,) = judged(find_left_behind(Masked().to("meta")), "x = x.to(device)", "attention_mask = attention_mask.to(device)")
    assert finding.severity == Severity.INFO


def test_a_model_with_nothing_left_behind_is_clear_and_no_model_is_not_judged():
    assert judged([]) == Clear()
    assert isinstance(ask(RULE, [Step(0, 0, {"loss": 1.0}, {}, (), {})]), NotEvaluated)


def test_a_model_of_which_a_small_part_is_elsewhere_has_left_nothing_behind():
    assert find_left_behind(nn.Sequential(Masked(), nn.Linear(4, 4), nn.Linear(4, 1, device="meta"))) == []
