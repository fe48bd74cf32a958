"""A baseline: bands of the loss and of the gradient norm, times and memory of healthy runs, in a small file.

The bands of several runs contain all of them, so that a difference by the seed is within the baseline.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sonde.comparison.loss_curves import Floats, Steps, Window, window_of, windows
from sonde.comparison.speed_and_memory import Spread, memory_sizes, step_times
from sonde.errors import SondeError
from sonde.formatting import strict
from sonde.run_view import RunView, trained_view
from sonde.runlog.run_directory import read_regular_file
from sonde.runlog.run_reader import Run

FORMAT = "sonde-baseline"
INNERMOST_LIST = re.compile(r"\[\n([^\[\]{}]*)\n *\]")
SCHEMA = 1
MAX_BYTES = 16 << 20  # of a file: a real one has some 20 kB
GRADIENT = "grad_norm"
FEW = 3  # numbers in a window: fewer are not compared


@dataclass(frozen=True, slots=True)
class Baseline:
    """The envelope of one run, or of several."""

    runs: tuple[str, ...]
    num_steps: int  # of the longest
    machine: str  # a digest of the host name; empty if the runs were made on several machines
    threads: str
    torch: str
    curves: Mapping[str, tuple[Window, ...]]  # "loss", "loss:2" …, "grad_norm": bands by step
    times: Mapping[str, Spread]  # ms: "step" and its phases
    memory: Mapping[str, Spread]  # bytes


def baseline_of(runs: Iterable[Run | Path | str]) -> Baseline:
    """The envelope of these runs: of the lowest rank of each, in its newest attempt."""
    opened = [run if isinstance(run, Run) else Run(run) for run in runs]
    if not opened:
        raise SondeError("a baseline is made of at least one run.")
    views = [trained(run) for run in opened]
    curves = {name: _bands([curve_of(one, name) for one in views]) for name in _names(views)}
    return Baseline(
        runs=tuple(run.name for run in opened),
        num_steps=max(view.num_steps for view in views),
        machine=_shared(machine_of(view) for view in views),
        threads=_shared(str(view.process.manifest.get("threads", "")) for view in views),
        torch=_shared(str(view.process.manifest.get("torch", "")) for view in views),
        curves={name: bands for name, bands in curves.items() if bands},
        times=_widest([step_times(view) for view in views]),
        memory=_widest([memory_of(view) for view in views]),
    )


def trained(run: Run) -> RunView:
    view = trained_view(run, next(iter(run.ranks), 0))
    if view is None:
        raise SondeError(f"{run.path} has no complete step, so it has no envelope.\nSee why: sonde diagnose {run.path}")
    return view


def curve_of(view: RunView, name: str) -> tuple[Steps, Floats]:
    """Steps and values of the loss, including NaN, or of the gradient norm."""
    if name != GRADIENT:
        return view.loss_series(name)
    values = view.steps[name]
    there = ~np.isnan(values)
    return view.step_numbers[there], values[there]


def memory_of(view: RunView) -> dict[str, Spread]:
    return {name: spread for name, spread in memory_sizes(view).items() if spread.high > 0}


def cut_as(bands: Sequence[Window], steps: Steps, values: Floats) -> list[Window | None]:
    """Another curve, cut into the windows of these bands; None if it has next to no values there."""
    bounds = [(int(np.searchsorted(steps, band.first)), int(np.searchsorted(steps, band.last, side="right"))) for band in bands]
    return [window_of(steps[start:end], values[start:end]) if end - start >= FEW else None for start, end in bounds]


def machine_of(view: RunView) -> str:
    host = str(view.process.manifest.get("host", ""))
    return hashlib.blake2b(host.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest() if host else ""


def _names(views: Sequence[RunView]) -> list[str]:
    known = sorted({name for view in views for name in view.steps})
    return [name for name in known if name in ("loss", GRADIENT) or name.startswith("loss:")]


def _bands(curves: Sequence[tuple[Steps, Floats]]) -> tuple[Window, ...]:
    bounds = windows(*max(curves, key=lambda curve: len(curve[0])))
    found = []
    for bound, *parts in zip(bounds, *(cut_as(bounds, *curve) for curve in curves)):
        present = [window for window in parts if window is not None]
        finite = [window for window in present if np.isfinite(window.median)]
        if present and 2 * len(finite) <= len(present):
            found.append(Window(bound.first, bound.last, float("nan"), float("nan"), float("nan")))
        elif present:
            median = float(np.median([window.median for window in finite]))
            found.append(Window(bound.first, bound.last, median, min(one.low for one in finite), max(one.high for one in finite)))
    return tuple(found)


def _widest(spreads: Sequence[Mapping[str, Spread]]) -> dict[str, Spread]:
    """Only of what all runs have measured."""
    found = {}
    for name in spreads[0]:
        if all(name in each for each in spreads):
            some = [each[name] for each in spreads]
            median = float(np.median([one.median for one in some]))
            found[name] = Spread(median, min(one.low for one in some), max(one.high for one in some), min(one.num for one in some))
    return found


def _shared(values: Iterable[str]) -> str:
    different = set(values)
    return different.pop() if len(different) == 1 else ""


# ---- on disk


def to_json(baseline: Baseline) -> str:
    """One strict JSON document with one band or spread per line, so that a diff can be read."""
    document = strict(
        {
            "format": FORMAT, "schema": SCHEMA, "runs": baseline.runs, "num_steps": baseline.num_steps, "machine": baseline.machine,
            "threads": baseline.threads, "torch": baseline.torch,
            "curves": {name: [_rounded(astuple(window)) for window in bands] for name, bands in baseline.curves.items()},
            "times_ms": {name: _rounded(astuple(spread)) for name, spread in baseline.times.items()},
            "memory_bytes": {name: _rounded(astuple(spread)) for name, spread in baseline.memory.items()},
        }
    )  # fmt: skip
    text = json.dumps(document, indent=1, allow_nan=False)
    return INNERMOST_LIST.sub(lambda match: f"[{' '.join(row.strip() for row in match[1].splitlines())}]", text) + "\n"


def load(path: str | Path) -> Baseline:
    """A baseline from a file. Raises SondeError if it is none."""
    again = f"Make one with: sonde baseline RUN -o {path}"
    try:
        document = json.loads(read_regular_file(Path(path).resolve(), MAX_BYTES))
    except OSError as error:
        raise SondeError(f"no baseline can be read from {path}: {error.strerror or error}.\n{again}") from None
    except (ValueError, RecursionError) as error:
        raise SondeError(f"{path} is not JSON, so it is no baseline of Sonde: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SondeError(f"{path} is not a baseline of Sonde.\n{again} --force")
    schema = document.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise SondeError(f"{path} is a baseline of format {schema!r}; this version reads up to {SCHEMA}.\nUpgrade: pip install -U sonde")
    try:
        return _parse(document)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise SondeError(f"the baseline in {path} is damaged: {error}.\n{again} --force") from None


def _parse(document: Mapping[str, Any]) -> Baseline:
    return Baseline(
        runs=tuple(str(name) for name in document["runs"]),
        num_steps=int(document["num_steps"]),
        machine=str(document["machine"]),
        threads=str(document["threads"]),
        torch=str(document["torch"]),
        curves={str(name): tuple(_window(*row) for row in bands) for name, bands in document["curves"].items() if bands},
        times={str(name): _spread(*row) for name, row in document["times_ms"].items()},
        memory={str(name): _spread(*row) for name, row in document["memory_bytes"].items()},
    )


def _window(first: Any, last: Any, median: Any, low: Any, high: Any) -> Window:
    return Window(int(first), int(last), float(median), float(low), float(high))


def _spread(median: Any, low: Any, high: Any, num: Any) -> Spread:
    return Spread(float(median), float(low), float(high), int(num))


def _rounded(row: Iterable[Any]) -> list[Any]:
    """Six digits: finer than any band."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in row]
