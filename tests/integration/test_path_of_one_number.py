"""The path that ARCHITECTURE.md draws for one number is the path that it takes: from torch's optimizer hook to `os.write`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde
from sonde.statistics import native_extension

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sonde"
MAX_FUNCTIONS, MAX_MODULES = 14, 10
CONTROL = "_optimizer_step_end on_optimizer_step_end _end_step _collect end_step _write_step column _add"


def drawn() -> list[tuple[str, str]]:
    block = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```path\n")[1].split("```")[0]
    return [(row.split()[0], row.split()[2] if row.split()[1] == "C" else row.split()[1]) for row in block.splitlines()]


def stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """Our functions that are active, the outermost first: module and qualified name."""
    found = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")  # patched functions have a made-up file name
        if module.startswith("sonde."):
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            found.append((module.removeprefix("sonde.").replace(".", "/") + ".py", name))
        frame = frame.f_back
    return found[::-1]


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """The stacks of an observed step where the gradients are measured, where their frame is encoded and put, and where it is written."""
    if not native_extension.ENABLED:
        pytest.skip("the native extension is not built")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, list[tuple[str, str]]] = {}

    def trace(frame: FrameType, event: str, function: Any) -> None:
        name = getattr(function, "__name__", "")
        if event == "c_call" and function in (native_extension.extension.measure, native_extension.encode_frame, os.write):
            here = stack(frame)
            is_gradient = name != "measure" or any(each.endswith("_measure_gradients") for _, each in here)
            is_parameter_probe = name != "encode_frame" or any(each == "ParameterProbe.collect" for _, each in here)
            if here and is_gradient and is_parameter_probe:
                found.setdefault(name, here)
        elif event == "call" and frame.f_code.co_qualname == "Writer.put":
            here = stack(frame)
            if any(each == "ParameterProbe.collect" for _, each in here):
                found.setdefault("put", here)

    with sonde.watch(model, optimizer, to=tmp_path_factory.mktemp("run") / "run", every=1, strict=True):
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            if step == 3:
                sys.setprofile(trace)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
    return found


def test_the_path_of_one_number_is_the_one_that_architecture_md_draws(stacks: dict[str, list[tuple[str, str]]]) -> None:
    """To the table: all functions of the stack. From there: the functions that hold the number or its record."""
    to_table = [*stacks["measure"], ("statistics/_native", "measure")]
    collect = next(i for i, (_, name) in enumerate(stacks["encode_frame"]) if name == "ParameterProbe.collect")
    to_record = [*stacks["encode_frame"][collect:], ("statistics/_native", "encode_frame"), stacks["put"][-1], stacks["write"][-1]]
    assert drawn() == [*to_table, *to_record]


def test_the_path_of_one_number_is_short() -> None:
    assert len(drawn()) <= MAX_FUNCTIONS
    assert len({module for module, _ in drawn()}) <= MAX_MODULES


def test_the_functions_that_end_the_step_are_named_beside_the_path(stacks: dict[str, list[tuple[str, str]]]) -> None:
    on_path = set(drawn())
    other = {name.rpartition(".")[2] for each in stacks.values() for module, name in each if (module, name) not in on_path}
    assert other == set(CONTROL.split())
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [name for name in other if f"{name}`" not in text] == []
