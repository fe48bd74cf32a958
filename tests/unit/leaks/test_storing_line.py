"""The line that stores tensors in the variable that holds them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("torch")

from sonde.leaks.storing_line import find_storing_line

pytestmark = pytest.mark.torch

history: dict[int, object] = {}


def line_of(text):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{Path(__file__).name}:{1 + next(number for number, line in enumerate(lines) if line.strip() == text)}"


class Recorder:
    kept: ClassVar[list[object]] = []

    def __init__(self):
        self.outputs = []

    def record(self, output):
        self.outputs.append(output)


def stores():
    frame, losses, total, number = sys._getframe(), [], 0.0, 1.0
    recorder = Recorder()
    for loss in (1.0, 2.0):
        losses.append(loss)
        total = total + loss
        number += 1
        history[int(loss)] = loss
        recorder.record(loss)
        Recorder.kept.append(loss)
    return frame, losses, total, number


@pytest.mark.parametrize(
    ("root", "text"),
    [
        ("stores() local 'losses'", "losses.append(loss)"),
        ("stores() local 'total'", "total = total + loss"),
        ("stores() local 'number'", "number += 1"),
        (f"{__name__} global 'history'", "history[int(loss)] = loss"),
        ("stores() local 'recorder.outputs'", "self.outputs.append(output)"),
        ("class Recorder attribute 'kept'", "Recorder.kept.append(loss)"),
    ],
)
def test_the_line_is_found_by_the_name_of_the_variable(root, text):
    frame, *_ = stores()
    assert find_storing_line(root, frame) == (line_of(text), text)


@pytest.mark.parametrize(
    "root",
    [
        "stores() local 'unknown'", "elsewhere() local 'losses'", "no.module global 'x'",
        "class Recorder attribute 'x'", "class Unknown attribute 'kept'",
        "a cell", "",
    ],
)  # fmt: skip
def test_a_variable_without_such_a_line_has_none(root):
    frame, *_ = stores()
    assert find_storing_line(root, frame) == ("", "")
