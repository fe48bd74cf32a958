"""What a user passes to `session.log`, or a function of `session.metric` returns: one number or text per name and step; a dictionary
gives several names.

A value that is neither gets a sentence that says what to log instead. Nothing here raises: the caller is a training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sonde.formatting import counted
from sonde.statistics.find_tensors import read_scalar
from sonde.statistics.statistics_without_extension import unsupported_reason

MAX_REFUSED = 100  # names whose values are not recorded: a program may make names without end
MAX_DEPTH = 4  # dictionaries inside of each other: a deeper one may contain itself


@dataclass(frozen=True, slots=True)
class LoggedValues:
    """Values by name. `refused` has a sentence instead of a value."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    on_device: dict[str, torch.Tensor] = field(default_factory=dict)  # of one element each
    refused: dict[str, str] = field(default_factory=dict)


def read_logged(values: Mapping[Any, Any]) -> LoggedValues:
    """Tensors on the CPU are read as they are, without a torch operation."""
    logged = LoggedValues()
    for name, value in values.items():
        _read(logged, str(name), value, 0)
    return logged


def _read(logged: LoggedValues, name: str, value: Any, depth: int) -> None:
    try:
        if isinstance(value, (float, int)):  # first, as nearly all are
            logged.numbers[name] = float(value)
        elif isinstance(value, torch.Tensor):
            _read_tensor(logged, name, value)
        elif isinstance(value, str):
            logged.texts[name] = value
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            for key, each in value.items():
                _read(logged, f"{name}/{key}", each, depth + 1)
        elif isinstance(value, (Sequence, set, frozenset, np.ndarray)):
            num = value.size if isinstance(value, np.ndarray) else len(value)
            if num == 1 and depth < MAX_DEPTH:
                _read(logged, name, value.item() if isinstance(value, np.ndarray) else next(iter(value)), depth + 1)
            else:
                logged.refused[name] = _several(name, type(value).__name__, num, is_array=isinstance(value, np.ndarray))
        elif value is None:
            logged.refused[name] = "it was None, which is no number: log it only in steps that have a value"
        else:
            logged.numbers[name] = float(value)
    except Exception as error:
        kind, why = type(value).__name__, type(error).__name__
        logged.refused[name] = f"a value of type {kind} cannot be read as one number ({why}): log a number, a text, or a dict"


def _read_tensor(logged: LoggedValues, name: str, value: torch.Tensor) -> None:
    if value.numel() != 1:
        logged.refused[name] = _several(name, "tensor", value.numel(), is_array=True)
    elif (number := read_scalar(value)) is not None:
        logged.numbers[name] = number
    elif (reason := unsupported_reason(value)) is None:
        logged.on_device[name] = value
    else:
        logged.refused[name] = f"it has no number to record: {reason}"


def _several(name: str, kind: str, num: int, *, is_array: bool) -> str:
    mean = f"{name}.mean()" if is_array else f"sum({name}) / len({name})"
    flat = f"{name}.flatten().tolist()" if is_array else name
    was = f"it was a {kind} of {counted(num, 'value')}, and one number per step is recorded"
    return f"{was}: for instance {mean}, or each value by its index, dict(enumerate({flat}))" if num else f"it was an empty {kind}"
