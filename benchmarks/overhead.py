"""What watching costs: process CPU time per step with Sonde and with its peers, as a ratio to the bare training.

    python benchmarks/overhead.py                    the whole table (about half an hour; peers from: pip install -e '.[bench]')
    python benchmarks/overhead.py --quick            a first look
    python benchmarks/overhead.py --only mlp --no-peers --json out.json

All take turns in one process, so that whatever else the machine does falls on all of them alike. Each has a model of its own from the
same seed, a ratio is to the bare turns just before and after, and the median over the rounds is shown with its quartiles. A row that
is over its budget ends the program with exit code 1. One more bare training takes its turns as well: how far its ratio is from 1, and its
quartiles from each other, says how sharp the others are. The first 300 steps of a run are shown, too: they are observed more often, and of
them nothing is promised.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from time import process_time

from machine import facts
from peers import PEERS, Watcher
from workloads import WORKLOADS, Training, Workload, prepare

import sonde

BARE = "bare"
FRESH_STEPS = 300  # of a run from its start: the first steps are observed more often than later ones
SETTLING_TURNS = 6, 30  # at least and at most, before the default is timed: until it observes again after its start. Timed earlier it would
# seem to cost next to nothing, because an expensive first step puts the governor in debt and nothing is observed until that is paid off;
# or too much, because the looks line by line come early in a run and then ever less often.
PEER_SHARE = 20  # a peer's turn is so many times shorter: its ratio is large and need not be sharp


class Sonde(Watcher):
    def __init__(self, training: Training, scratch: Path, every: int | None) -> None:
        name = tempfile.mkdtemp(dir=scratch)
        self.session = sonde.watch(training.model, training.optimizer, to=name, every=every, strict=True)
        self._paused = self.session.pause()
        self._paused.__enter__()

    def observed(self) -> list[bool]:
        """For each step of the run so far: were the statistics of all sites taken?"""
        assert self.session.run is not None
        return [bool(value) for value in sonde.Run(self.session.run).scalar("observed")[1]]

    def begin(self) -> None:
        self._paused.__exit__(None, None, None)

    def end(self) -> None:
        self._paused = self.session.pause()
        self._paused.__enter__()

    def close(self) -> None:
        self._paused.__exit__(None, None, None)
        self.session.close()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    workload: str
    variant: str
    step_ms: float = 0.0
    ratio: float = 0.0
    low: float = 0.0  # quartiles of the ratio
    high: float = 0.0
    budget: float | None = None
    observed_share: float | None = None  # of the steps: a low ratio says little where nothing was observed
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.note:
            return self.note
        kept = [] if self.budget is None else [f"{'over' if self.is_over else 'within'} budget ({self.budget:.2f})"]
        return ", ".join(kept + ([] if self.observed_share is None else [f"{self.observed_share:.1%} of steps observed"]))

    @property
    def is_over(self) -> bool:
        return self.budget is not None and not self.note and self.ratio > self.budget


# -- measuring -------------------------------------------------------------------------------------


def turn(training: Training, watcher: Watcher, num_steps: int, num_warm: int) -> float:
    """CPU milliseconds per step of one turn."""
    watcher.begin()
    for _ in range(num_warm):
        training.step()
    started = process_time()
    for _ in range(num_steps):
        training.step()
    watcher.synchronize()
    elapsed_s = process_time() - started
    watcher.end()
    return elapsed_s * 1e3 / num_steps


def take_turns(
    workload: Workload, trainings: Sequence[tuple[Training, Watcher, int]], bares: Sequence[Training], num_rounds: int, slices: int = 1
) -> list[list[tuple[float, float]]]:
    """For each training its (own, bare) milliseconds per step, round by round; a bare one runs before and after each of so many slices."""
    results: list[list[tuple[float, float]]] = [[] for _ in trainings]
    nobody, num_bare, num_warm, next_bare = Watcher(), max(1, workload.chunk // slices), workload.num_warm, cycle(bares)
    before = turn(next(next_bare), nobody, num_bare, num_warm)
    for _ in range(num_rounds):
        for result, (training, watcher, num_steps) in zip(results, trainings):
            own_ms = bare_ms = 0.0
            gc.collect()  # garbage of others is not this one's
            for _ in range(slices):
                own_ms += turn(training, watcher, max(1, num_steps // slices), num_warm)
                after = turn(next(next_bare), nobody, num_bare, num_warm)
                bare_ms += (before + after) / 2
                before = after
            result.append((own_ms / slices, bare_ms / slices))
    return results


def row(
    workload: Workload,
    variant: str,
    times: Iterable[tuple[float, float]],
    budget: float | None = None,
    observed: Sequence[bool] = (),
) -> Row:
    times = list(times)
    ratios = sorted(own / bare for own, bare in times)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    share = sum(observed) / len(observed) if observed else None
    return Row(workload.name, variant, statistics.median(own for own, _ in times), middle, low, high, budget, share)


def settle(workload: Workload, training: Training, watcher: Sonde) -> int:
    """Train until the governor has paid for the start; answers with the number of steps that took."""
    at_least, at_most = SETTLING_TURNS
    for number in range(at_most):
        turn(training, watcher, workload.chunk, workload.num_warm)
        observed = watcher.observed()
        first_plain = observed.index(False) if False in observed else len(observed)
        if number + 1 >= at_least and any(observed[first_plain:]):
            break
    return len(watcher.observed())


def sonde_rows(workload: Workload, scratch: Path, num_rounds: int) -> Iterator[Row]:
    # Of two equal trainings the one that was made first is slower, by 1 % on the MLP: so there is a bare one on either side.
    first, again, everything, default, last = (Training(workload) for _ in range(5))
    all_watcher, default_watcher = Sonde(everything, scratch, every=1), Sonde(default, scratch, every=None)
    num_settling = settle(workload, default, default_watcher)
    trainings = [(again, Watcher(), workload.chunk), (everything, all_watcher, workload.chunk), (default, default_watcher, workload.chunk)]
    num_slices = workload.chunk // workload.num_in_slice
    again_times, every_times, default_times = take_turns(workload, trainings, (first, last), num_rounds, num_slices)
    all_watcher.close()
    default_watcher.close()
    yield row(workload, BARE, [(bare_ms, bare_ms) for _, bare_ms in every_times])
    yield row(workload, "bare, another one", again_times)
    yield row(workload, "Sonde, everything, every step", every_times, workload.every_budget, all_watcher.observed())
    observed = default_watcher.observed()[num_settling:]
    yield row(workload, "Sonde, default", default_times, workload.default_budget, observed)


def fresh_row(workload: Workload, scratch: Path, num_steps: int, num_runs: int) -> Row:
    """The default over a run from its first step, attaching and closing included: whole runs, each between two bare ones."""
    Training(workload).step()  # torch's own first step is slow, and nobody's
    times, observed = [], list[bool]()
    before = whole_run(workload, num_steps)
    for _ in range(num_runs):
        gc.collect()
        training = Training(workload)
        started = process_time()
        with sonde.watch(training.model, training.optimizer, to=tempfile.mkdtemp(dir=scratch), strict=True) as session:
            for _ in range(num_steps):
                training.step()
        own_ms = (process_time() - started) * 1e3 / num_steps
        after = whole_run(workload, num_steps)
        times.append((own_ms, (before + after) / 2))
        before = after
        assert session.run is not None
        observed += [bool(value) for value in sonde.Run(session.run).scalar("observed")[1]]
    return row(workload, "Sonde, default, a run from its start", times, observed=observed)


def whole_run(workload: Workload, num_steps: int) -> float:
    """CPU milliseconds per step of a bare run."""
    gc.collect()
    training = Training(workload)
    started = process_time()
    for _ in range(num_steps):
        training.step()
    return (process_time() - started) * 1e3 / num_steps


def peer_rows(workload: Workload, scratch: Path, num_rounds: int) -> Iterator[Row]:
    num_steps = max(2, workload.chunk // PEER_SHARE)
    bare = Training(workload)
    for peer in PEERS:
        if not peer.is_installed:
            yield Row(workload.name, peer.name, note="not installed")
            continue
        training = Training(workload)
        watcher = peer.make(training, scratch)
        (times,) = take_turns(workload, [(training, watcher, num_steps)], [bare], num_rounds)
        watcher.close()
        yield row(workload, peer.name, times)


# -- showing ---------------------------------------------------------------------------------------


def show(row: Row) -> None:
    spread = "1" if row.variant == BARE else f"{row.ratio:.3f} ({row.low:.3f}–{row.high:.3f})"
    numbers = f"{'':9}  {'':22}" if row.note else f"{row.step_ms:9.2f}  {spread:>22}"
    print(f"{row.workload:12} {row.variant:38}{numbers}  {row.verdict}".rstrip(), flush=True)


def table(rows: Sequence[Row]) -> str:
    """All of it in Markdown, a column per workload: as the README has it."""
    names = list(dict.fromkeys(row.workload for row in rows))
    by_place = {(row.variant, row.workload): row for row in rows}

    def cell(variant: str, name: str) -> str:
        row = by_place.get((variant, name))
        if row is None or row.note:
            return row.note if row else "–"
        if variant == BARE:
            return f"1 ({row.step_ms:.1f} ms)"
        return f"{row.ratio:.2f}" + (f" (budget {row.budget:.2f})" if row.budget else "")

    titles = {workload.name: workload.title for workload in WORKLOADS}
    lines = [["", *(titles[name] for name in names)], ["---"] * (len(names) + 1)]
    lines += [[variant, *(cell(variant, name) for name in names)] for variant in dict.fromkeys(row.variant for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure(workloads: Sequence[Workload], scratch: Path, *, num_rounds: int, quick: bool, with_peers: bool) -> Iterator[Row]:
    """Sonde on all workloads, then the peers, which leave imports and threads behind."""
    for workload in workloads:
        yield from sonde_rows(workload, scratch, num_rounds)
        is_fast = workload.chunk > 20
        if is_fast or not quick:
            yield fresh_row(workload, scratch, FRESH_STEPS, num_runs=min(num_rounds, 5) if is_fast else 1)
    for workload in workloads if with_peers else ():
        yield from peer_rows(workload, scratch, 2 if quick else 5)


def main() -> int:
    parser = argparse.ArgumentParser(description="What watching costs, as a ratio of CPU time to the bare training.")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parser.add_argument("--only", choices=[workload.name for workload in WORKLOADS], action="append", help="this workload; may be repeated")
    parser.add_argument("--no-peers", action="store_true", help="Sonde alone")
    parser.add_argument("--quick", action="store_true", help="few rounds: a first look, not numbers to publish")
    parser.add_argument("--rounds", type=int, help="turns of each (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    arguments = parser.parse_args()
    prepare(arguments.threads)
    workloads = [workload for workload in WORKLOADS if not arguments.only or workload.name in arguments.only]
    num_rounds = arguments.rounds or (3 if arguments.quick else 15)
    print(f"{facts()}\n\n{'':51}{'ms a step':>9}  {'ratio (quartiles)':>22}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        each_row = measure(workloads, Path(scratch), num_rounds=num_rounds, quick=arguments.quick, with_peers=not arguments.no_peers)
        for each in each_row:
            show(each)
            rows.append(each)
    print("\n" + table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts(), "rows": [asdict(each) for each in rows]}, indent=1) + "\n")
    num_over = sum(each.is_over for each in rows)
    print(f"\n{num_over} over budget" if num_over else "\nall within budget")
    return 1 if num_over else 0


if __name__ == "__main__":
    sys.exit(main())
