"""A baseline: what a training that is known to be well does, kept in a small file: bands of its loss and gradients, times, memory.

Several runs make one baseline: its bands are as wide as all of them together, so that what differs by the seed is no departure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sonde.comparison.curves import Floats, Steps, Window, window_of, windows
from sonde.comparison.pace import Spread, sizes_of, spread_of, times_of
from sonde.errors import SondeError
from sonde.formatting import strict
from sonde.run_view import RunView, trained_view
from sonde.runlog.reader import Run

FORMAT = "sonde-baseline"
SCHEMA = 1
GRADIENT = "grad_norm"
FEW = 3  # numbers in a window: fewer say nothing of it


@dataclass(frozen=True, slots=True)
class Baseline:
    """The envelope of one run, or of several."""

    runs: tuple[str, ...]
    num_steps: int  # of the longest
    machine: str  # a digest: it tells machines apart and names none. Empty where the runs were made on several
    threads: str
    torch: str
    curves: Mapping[str, tuple[Window, ...]]  # "loss", "loss:2" …, "grad_norm": bands by step
    times: Mapping[str, Spread]  # ms: "step" and its phases
    memory: Mapping[str, Spread]  # bytes


def baseline_of(runs: Iterable[Run | Path | str]) -> Baseline:
    """The envelope of these runs. Of a run with several processes, that of the lowest rank as it was last started."""
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
        times=_widest([times_of(view) for view in views]),
        memory=_widest([memory_of(view) for view in views]),
    )


def trained(run: Run) -> RunView:
    view = trained_view(run, next(iter(run.ranks), 0))
    if view is None:
        raise SondeError(f"{run.path} has no complete step, so it has no envelope.\nWhat became of it: sonde diagnose {run.path}")
    return view


def curve_of(view: RunView, name: str) -> tuple[Steps, Floats]:
    """The numbers that were there; a loss that was NaN is one of them."""
    if name != GRADIENT:
        return view.loss_series(name)
    values = view.steps[name]
    there = ~np.isnan(values)
    return view.step_numbers[there], values[there]


def memory_of(view: RunView) -> dict[str, Spread]:
    spreads = {name: spread_of(sizes) for name, sizes in sizes_of(view).items()}
    return {name: spread for name, spread in spreads.items() if spread and spread.high > 0}


def cut_as(bands: Sequence[Window], steps: Steps, values: Floats) -> list[Window | None]:
    """The same stretches of another curve; None where it has next to nothing."""
    cut: list[Window | None] = []
    for band in bands:
        part = slice(int(np.searchsorted(steps, band.first)), int(np.searchsorted(steps, band.last, side="right")))
        cut.append(window_of(steps[part], values[part]) if part.stop - part.start >= FEW else None)
    return cut


def machine_of(view: RunView) -> str:
    host = str(view.process.manifest.get("host", ""))
    return hashlib.blake2b(host.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest() if host else ""


def _names(views: Sequence[RunView]) -> list[str]:
    known = sorted({name for view in views for name in view.steps})
    return [name for name in known if name in ("loss", GRADIENT) or name.startswith("loss:")]


def _bands(curves: Sequence[tuple[Steps, Floats]]) -> tuple[Window, ...]:
    bounds = windows(*max(curves, key=lambda curve: len(curve[0])))
    parts = [cut_as(bounds, *curve) for curve in curves]
    found = []
    for place in range(len(bounds)):
        some = [windows_of_one[place] for windows_of_one in parts]
        there = [window for window in some if window is not None]
        finite = [window for window in there if np.isfinite(window.median)]
        if not there:
            continue
        if 2 * len(finite) <= len(there):
            found.append(Window(bounds[place].first, bounds[place].last, float("nan"), float("nan"), float("nan")))
            continue
        median = float(np.median([window.median for window in finite]))
        low, high = min(window.low for window in finite), max(window.high for window in finite)
        found.append(Window(bounds[place].first, bounds[place].last, median, low, high))
    return tuple(found)


def _widest(spreads: Sequence[Mapping[str, Spread]]) -> dict[str, Spread]:
    """What all runs have taken: a time that only some of them know is no baseline for the others."""
    shared = [name for name in spreads[0] if all(name in some for some in spreads)]
    found = {}
    for name in shared:
        some = [each[name] for each in spreads]
        middle = float(np.median([one.median for one in some]))
        found[name] = Spread(middle, min(one.low for one in some), max(one.high for one in some), min(one.num for one in some))
    return found


def _shared(values: Iterable[str]) -> str:
    different = set(values)
    return different.pop() if len(different) == 1 else ""


# ---- on disk


def to_json(baseline: Baseline) -> str:
    """One strict JSON document, a band or a spread to a line so that a change of it can be read in a diff."""
    document = strict(
        {
            "format": FORMAT, "schema": SCHEMA, "runs": baseline.runs, "num_steps": baseline.num_steps, "machine": baseline.machine,
            "threads": baseline.threads, "torch": baseline.torch,
            "curves": {name: [_rounded(astuple(window)) for window in bands] for name, bands in baseline.curves.items()},
            "times_ms": {name: _rounded(astuple(spread)) for name, spread in baseline.times.items()},
            "memory_bytes": {name: _rounded(astuple(spread)) for name, spread in baseline.memory.items()},
        }
    )  # fmt: skip
    rows = [f" {json.dumps(name)}: {_block(value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def load(path: str | Path) -> Baseline:
    """A baseline from a file. Raises SondeError where it is none."""
    where = Path(path)
    try:
        document = json.loads(where.read_text(encoding="utf-8"))
    except OSError as error:
        raise SondeError(
            f"no baseline can be read from {where}: {error.strerror or error}.\nMake one with: sonde baseline RUN -o {where}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SondeError(f"{where} is not JSON, so it is no baseline of Sonde: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SondeError(f"{where} is not a baseline of Sonde.\nMake one with: sonde baseline RUN -o {where} --force")
    schema = document.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise SondeError(
            f"{where} is a baseline of format {schema!r}; this version reads up to {SCHEMA}.\nUpgrade with: pip install -U sonde"
        )
    try:
        return _from(document)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise SondeError(
            f"the baseline in {where} is damaged: {error}.\nMake a new one with: sonde baseline RUN -o {where} --force"
        ) from None


def _from(document: Mapping[str, Any]) -> Baseline:
    return Baseline(
        runs=tuple(str(name) for name in document["runs"]),
        num_steps=int(document["num_steps"]),
        machine=str(document["machine"]),
        threads=str(document["threads"]),
        torch=str(document["torch"]),
        curves={str(name): tuple(_window(row) for row in bands) for name, bands in document["curves"].items() if bands},
        times={str(name): _spread(row) for name, row in document["times_ms"].items()},
        memory={str(name): _spread(row) for name, row in document["memory_bytes"].items()},
    )


def _window(row: Sequence[Any]) -> Window:
    first, last, median, low, high = row
    return Window(int(first), int(last), float(median), float(low), float(high))


def _spread(row: Sequence[Any]) -> Spread:
    median, low, high, num = row
    return Spread(float(median), float(low), float(high), int(num))


def _rounded(row: Iterable[Any]) -> list[Any]:
    """Six digits: far finer than any band, and a file that people can read."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in row]


def _block(value: Any, depth: int = 1) -> str:
    """JSON whose innermost lists stand on one line."""
    is_flat = not isinstance(value, dict) and not (isinstance(value, list) and any(isinstance(one, list) for one in value))
    if is_flat or not value:
        return json.dumps(value, allow_nan=False)
    blanks = " " * (depth + 1)
    keys = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    inner = value.values() if isinstance(value, dict) else value
    rows = [f"{blanks}{key}{_block(one, depth + 1)}" for key, one in zip(keys, inner)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(rows) + f"\n{' ' * depth}{closing}"
