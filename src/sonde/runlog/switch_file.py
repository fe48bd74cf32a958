"""The switches of a session, and the file in the run directory by which other processes turn them on and off.

The file holds requests, `{"gradient_norms": true}`, and nothing else. The training process reads it between two steps.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from sonde.errors import SondeError
from sonde.runlog.run_directory import read_json, replace_json

SWITCHES: Mapping[str, str] = {
    "autograd_anomaly": "torch's anomaly mode: a failing backward shows the forward line that it belongs to",
    "autograd_profiler": "torch.profiler over the next steps: the costliest operations, and a trace in the run's directory",
    "tensorboard_profiler": "the same with shapes and FLOPs, in TensorBoard's format",
    "memory_usage": "memory of the process, the system and the device; of parameters, gradients and optimizer state",
    "gradient_norms": "norm of all gradients, the largest and the smallest parameter's",
    "forward_pass": "forwards, their time, shapes of inputs and outputs, the loss, the device",
    "backward_pass": "backwards, their time, the loss, the gradient norm, gradients that are not finite, the size of the update",
    "device_placement": "devices of parameters, inputs and optimizer state",
    "mixed_precision": "autocast, the scale of a GradScaler and skipped steps, dtypes",
    "data_loading": "dataset, splits, batch size, workers, time spent waiting for batches",
    "validation": "batches and samples of an evaluation, its time, memory",
    "early_stopping": "the best loss so far, and how long ago it was",
    "lr_scheduling": "learning rates, their schedulers, and every change",
}
"""Every switch, and what it prints."""

SWITCHES_FILE = "switches.json"
MAX_BYTES = 4096  # a longer file was not written by Sonde


def check_switch_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """These switches, without duplicates; a `SondeError` for an unknown name lists the nearest ones."""
    given: object = names
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        example = "['gradient_norms', 'memory_usage']"
        raise SondeError(f"switches are given by name, as in {example}, not {given!r}.\nThere are: {', '.join(SWITCHES)}")
    found: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        if name not in SWITCHES:
            near = difflib.get_close_matches(str(name), SWITCHES, n=3)
            hint = f"Nearest: {', '.join(near)}" if near else f"There are: {', '.join(SWITCHES)}"
            raise SondeError(f"there is no switch {name!r}.\n{hint}")
        found[name] = None
    return tuple(found)


def parse_switch_words(words: Iterable[str]) -> dict[str, bool]:
    """Requests from words such as `+gradient_norms -memory_usage`; `+all` and `-all` mean all switches."""
    requests: dict[str, bool] = {}
    for word in words:
        sign, name = word[:1], word[1:].replace("-", "_")
        if sign not in ("+", "-") or not name:
            raise SondeError(f"a switch is turned on with + and off with -, as in +gradient_norms -memory_usage; not {word!r}.")
        for each in SWITCHES if name == "all" else check_switch_names(name):
            requests[each] = sign == "+"
    return requests


def read_switch_requests(directory: Path) -> dict[str, bool]:
    """The requests; empty without a file. A ValueError describes why the file is invalid."""
    requests = read_json(Path(directory) / SWITCHES_FILE, MAX_BYTES)
    for name, on in requests.items():
        if name not in SWITCHES or not isinstance(on, bool):
            raise ValueError("it holds more than switches that are true or false")
    return requests


def write_switch_requests(directory: Path, changes: Mapping[str, bool]) -> None:
    """Add requests. An invalid file is replaced."""
    try:
        before = read_switch_requests(directory)
    except ValueError:
        before = {}
    target = Path(directory) / SWITCHES_FILE
    try:
        replace_json(target, before | dict(changes))
    except OSError as error:
        raise SondeError(f"the switches cannot be written to {target}: {error.strerror or error}.") from error
