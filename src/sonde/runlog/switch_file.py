"""The switches of a session by name, and the small file in a run's directory through which they are flipped from outside.

The file holds wishes, `{"gradient_norms": true}`, and nothing else. Whoever trains looks at it now and then, between two steps.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from sonde.errors import SondeError
from sonde.runlog.directory import read_json, replace_json

SWITCHES: Mapping[str, str] = {
    "autograd_anomaly": "torch's anomaly mode: a failing backward shows the forward line that it belongs to",
    "autograd_profiler": "torch.profiler over the next steps: the costliest operations, and a trace in the run's directory",
    "tensorboard_profiler": "the same with shapes and FLOPs, as TensorBoard reads it",
    "memory_usage": "memory of the process, parameters, gradients and optimizer state",
    "gradient_norms": "norm of all gradients, the largest and the smallest parameter's",
    "forward_pass": "forwards, their time, what went in",
    "backward_pass": "backwards, their time, the loss",
    "device_placement": "where parameters, inputs and optimizer state are",
    "mixed_precision": "types of numbers, the scale of a GradScaler and what it skipped",
    "data_loading": "time spent waiting for batches, and their size",
    "validation": "forwards without gradients, and their time",
    "early_stopping": "the best loss so far, and how long ago it was",
    "lr_scheduling": "learning rates, and how they changed",
}
"""Every switch, and what it tells of."""

WISHES = "switches.json"
MAX_BYTES = 4096  # a longer file is not ours


def known(names: str | Iterable[str]) -> tuple[str, ...]:
    """These switches, once each; a `SondeError` names the nearest one where there is none of that name."""
    found: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        if name not in SWITCHES:
            near = difflib.get_close_matches(str(name), SWITCHES, n=3)
            hint = f"Nearest: {', '.join(near)}" if near else f"There are: {', '.join(SWITCHES)}"
            raise SondeError(f"there is no switch {name!r}.\n{hint}")
        found[name] = None
    return tuple(found)


def parsed(words: Iterable[str]) -> dict[str, bool]:
    """`+gradient_norms -memory_usage`, as a command line has it; `+all` and `-all` mean all of them."""
    wishes: dict[str, bool] = {}
    for word in words:
        sign, name = word[:1], word[1:].replace("-", "_")
        if sign not in ("+", "-") or not name:
            raise SondeError(f"a switch is turned on with + and off with -, as in +gradient_norms -memory_usage; not {word!r}.")
        for each in SWITCHES if name == "all" else known(name):
            wishes[each] = sign == "+"
    return wishes


def read_wishes(directory: Path) -> dict[str, bool]:
    """What is wished for. A ValueError says why a file is not ours; where there is none the answer is empty."""
    wishes = read_json(Path(directory) / WISHES, MAX_BYTES)
    for name, on in wishes.items():
        if name not in SWITCHES or not isinstance(on, bool):
            raise ValueError("it holds more than switches that are true or false")
    return wishes


def write_wishes(directory: Path, changes: Mapping[str, bool]) -> None:
    """Adds to what is wished for. A file that is not ours is replaced."""
    try:
        before = read_wishes(directory)
    except ValueError:
        before = {}
    target = Path(directory) / WISHES
    try:
        replace_json(target, before | dict(changes))
    except OSError as error:
        raise SondeError(f"the switches cannot be written to {target}: {error.strerror or error}.") from error
