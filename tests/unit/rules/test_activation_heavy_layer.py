"""A layer whose output decides what memory a training needs: found where memory is tight, and only there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from sonde.events import Event, Frame, Kind, Step
from sonde.rules.memory.activation_heavy_layer import RULE as activation_heavy_layer
from sonde.rules.memory.activation_heavy_layer import _width
from sonde.rules.rule import Clear
from sonde.run_view import layer_statistics_in_blocks
from synthetic_steps import LAYERS, ask, the_finding, training, why_not

MB = 2**20


def steps(sizes: Mapping[str, int], *, limit: int | None = 1000, gradients: bool = True, num: int = 20) -> list[Step]:
    """Outputs of so many MiB, on a machine that has `limit` of them."""
    made = []
    for step in training(num):
        frames = dict(step.frames)
        for kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT):
            if kind in frames:
                frames[kind] = _resized(frames[kind], step, sizes)
        if not gradients:
            frames.pop(Kind.ACTIVATION_GRADIENT, None)
        events = step.events
        if limit is not None and step.number == 0:
            events = (*events, Event("memory_limit", 0, {"num_bytes": limit * MB, "by": "the container"}))
        made.append(Step(step.number, 0, step.scalars, frames, events, step.sites))
    return made


def _resized(frame: Frame, step: Step, sizes: Mapping[str, int]) -> Frame:
    values = frame.values.copy()
    for column, number in enumerate(frame.sites.tolist()):
        path = step.sites[number].path if number in step.sites else ""
        values[frame.fields.index("num"), column] = sizes.get(path, 1) * MB / 4
    return replace(frame, values=np.asarray(values))


def test_one_output_that_takes_much_of_the_memory_is_named_with_its_size():
    finding = the_finding(activation_heavy_layer, steps({LAYERS[2]: 150}))
    assert finding.where.endswith(LAYERS[2])
    assert "150 MiB: 15 % of the 1,000 MiB of the container" in finding.cause
    assert finding.evidence["share_of_activations"] > 0.9


def test_an_output_counts_as_large_as_it_is_in_three_steps(monkeypatch):
    some = steps({})
    for large in (some[2], some[7], some[15]):  # in different blocks
        large.frames[Kind.ACTIVATION] = _resized(large.frames[Kind.ACTIVATION], large, {LAYERS[2]: 200 + large.number})
    finding = the_finding(activation_heavy_layer, some)
    assert finding.evidence["output_bytes"] == 202 * MB
    monkeypatch.setattr(layer_statistics_in_blocks, "MAX_BYTES", 1)
    assert the_finding(activation_heavy_layer, some) == finding
    some[7].frames[Kind.ACTIVATION] = some[6].frames[Kind.ACTIVATION]
    assert ask(activation_heavy_layer, some) == Clear()


def test_layers_of_equal_size_behind_each_other_are_one_place():
    sizes = dict.fromkeys(LAYERS[1:3], 80)
    assert ask(activation_heavy_layer, steps(sizes)) == Clear()  # two of five are no longer one place
    finding = the_finding(activation_heavy_layer, _deeper(steps(sizes)))
    assert "behind it" in finding.cause


def _deeper(some: list[Step]) -> list[Step]:
    """The same, with four more small layers in front."""
    made = []
    for step in some:
        sites, frames = dict(step.sites), dict(step.frames)
        for kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT):
            if kind in frames:
                frame = frames[kind]
                extra = np.repeat(frame.values[:, :1], 4, axis=1)
                frames[kind] = replace(
                    frame, sites=np.concatenate([np.arange(900, 904, dtype=frame.sites.dtype), frame.sites]),
                    values=np.concatenate([extra, frame.values], axis=1),
                )  # fmt: skip
        first = step.sites[min(step.sites)]
        sites |= {900 + number: replace(first, id=900 + number, kind="output", path=f"stem.{number}") for number in range(4)}
        made.append(Step(step.number, 0, step.scalars, frames, step.events, sites))
    return made


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ({LAYERS[2]: 150}, {"limit": 100_000}),
        (dict.fromkeys(LAYERS, 150), {}),
        ({LAYERS[0]: 150, LAYERS[2]: 140, LAYERS[4]: 130}, {}),
        ({LAYERS[2]: 150}, {"gradients": False}),
    ],
    ids=["there is plenty", "all are alike", "none has most", "needs no gradient"],
)
def test_what_decides_nothing_is_clear(sizes, more):
    assert ask(activation_heavy_layer, steps(sizes, **more)) == Clear()


def test_where_the_memory_is_not_known_it_cannot_tell():
    assert why_not(activation_heavy_layer, steps({LAYERS[2]: 150}, limit=None)) == "how much memory there is is not known"
    assert "fewer than 3 steps" in why_not(activation_heavy_layer, steps({LAYERS[2]: 150}, num=2))


@pytest.mark.parametrize(("dtype", "width"), [("float16", 2), ("complex64", 8), ("bool", 1), ("", 4), ("float8_e4m3fn", 1)])
def test_numbers_have_the_width_that_their_type_says(dtype, width):
    assert _width(dtype) == width
