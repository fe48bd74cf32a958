"""Which inputs of models are checked for NaN and Inf."""

from __future__ import annotations

from math import inf

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import sonde
from sonde.runlog.run_reader import Run

pytestmark = pytest.mark.torch


def test_the_output_of_one_model_is_no_bad_input_of_the_next(tmp_path):
    """What a decoder gets from its encoder was computed, and is not in the data."""
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.0)
    with sonde.DebugSession(sonde.DebugConfig(every=1), to=tmp_path, strict=True):
        for value, scale in ((1.0, 1.0), (1.0, inf), (inf, 1.0)):
            optimizer.zero_grad()
            decoder(encoder(torch.full((8, 4), value)) * scale).sum().backward()
            optimizer.zero_grad()
            optimizer.step()
    bad = [(event.step, event.data["what"]) for event in Run(tmp_path).events("nonfinite")]
    assert [step for step, what in bad if what == "input"] == [2]
    assert [step for step, what in bad if what == "loss"] == [1, 2]


def test_a_model_that_is_one_layer_is_named_as_the_model(tmp_path):
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, 10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sonde.watch(model, optimizer, to=tmp_path, every=1) as session:
        for value in (1.0, 1.0, 3e38):
            optimizer.zero_grad()
            model(torch.full((8, 4), value)).sum().backward()
            optimizer.step()
    finding = next(each for each in session.report().findings if each.rule == "nonfinite-loss")
    assert "the output of the model was not finite already (8 numbers)" in finding.cause
