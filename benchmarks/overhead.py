"""What watching costs: time per step with Sonde and with other tools, as a ratio to the bare training.

    python benchmarks/overhead.py                    the whole table (more than an hour; other tools from: pip install -e '.[bench]')
    python benchmarks/overhead.py --quick            a first look
    python benchmarks/overhead.py --only mlp --no-peers --json out.json

All variants take turns in one process, so that other load on the machine affects all of them alike. Each has a model of its own from the
same seed. A ratio is to the bare turns just before and after; the table shows the median over the rounds with its quartiles, for process
CPU time and for wall time. Budgets are on CPU time: a budget holds when the median over at least 20 rounds is at most the budget plus
0.01, in two runs. A budget that does not hold ends the program with exit code 1; with fewer rounds nothing is judged.

A second bare training takes its turns as well: the distance of its ratio from 1, and of its quartiles from each other, shows the noise.
The first 300 steps of a run are shown too: they are observed more often, and nothing is promised of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from machine import facts
from peers import PEERS, Watcher
from workloads import MIN_ROUNDS, NUM_RUNS, WORKLOADS, Training, Workload, is_over_budget, prepare

import sonde

BARE = "bare"
FRESH_STEPS = 300  # of a run from its start: the first steps are observed more often than later ones
SETTLING_TURNS = 6, 30  # at least and at most, before the default is timed: until it observes again after its start. Timed earlier it would
# seem to cost next to nothing, because an expensive first step exhausts the overhead budget and nothing is observed until that is made up
# for; or too much, because profiled steps come early in a run and then less and less often.
PEER_SHARE = 20  # a peer's turn is so many times shorter: its ratio is large and need not be precise


class Time(NamedTuple):
    """Milliseconds per step."""

    cpu_ms: float
    wall_ms: float


Pair = tuple[Time, Time]  # of a variant, and of the bare training at the same time


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
    ratio: float = 0.0  # of CPU time
    low: float = 0.0  # quartiles of the ratio
    high: float = 0.0
    wall_ratio: float = 0.0
    wall_low: float = 0.0
    wall_high: float = 0.0
    num_rounds: int = 0
    budget: float | None = None
    observed_share: float | None = None  # of the steps: a low ratio says little if nothing was observed
    note: str = ""
    run: int = 1

    @property
    def verdict(self) -> str:
        if self.note:
            return self.note
        parts = []
        if self.budget is not None:
            word = "too few rounds to judge" if self.num_rounds < MIN_ROUNDS else "over" if self.is_over else "within"
            parts.append(f"budget {self.budget:.2f}: {word}")
        if self.observed_share is not None:
            parts.append(f"{self.observed_share:.1%} of steps observed")
        return ", ".join(parts)

    @property
    def is_judged(self) -> bool:
        return self.budget is not None and not self.note and self.num_rounds >= MIN_ROUNDS

    @property
    def is_over(self) -> bool:
        return self.budget is not None and self.is_judged and is_over_budget(self.ratio, self.budget)


# -- measuring -------------------------------------------------------------------------------------


def turn(training: Training, watcher: Watcher, num_steps: int, num_warm: int) -> Time:
    """Run one turn; return its time per step."""
    watcher.begin()
    for _ in range(num_warm):
        training.step()
    cpu_s, wall_s = process_time(), perf_counter()
    for _ in range(num_steps):
        training.step()
    watcher.flush()
    cpu_s, wall_s = process_time() - cpu_s, perf_counter() - wall_s
    watcher.end()
    return Time(cpu_s * 1e3 / num_steps, wall_s * 1e3 / num_steps)


def mean(times: Sequence[Time]) -> Time:
    return Time(statistics.fmean(time.cpu_ms for time in times), statistics.fmean(time.wall_ms for time in times))


def take_turns(
    workload: Workload, trainings: Sequence[tuple[Training, Watcher, int]], bares: Sequence[Training], num_rounds: int, slices: int = 1
) -> list[list[Pair]]:
    """For each training its own and the bare time, round by round; a bare training runs before and after each of so many slices."""
    results: list[list[Pair]] = [[] for _ in trainings]
    nobody, num_bare, num_warm, next_bare = Watcher(), max(1, workload.chunk // slices), workload.num_warm, cycle(bares)
    before = turn(next(next_bare), nobody, num_bare, num_warm)
    for _ in range(num_rounds):
        for result, (training, watcher, num_steps) in zip(results, trainings):
            own, bare = list[Time](), list[Time]()
            gc.collect()  # garbage of others does not count for this one
            for _ in range(slices):
                own.append(turn(training, watcher, max(1, num_steps // slices), num_warm))
                after = turn(next(next_bare), nobody, num_bare, num_warm)
                bare.append(mean([before, after]))
                before = after
            result.append((mean(own), mean(bare)))
    return results


def quartiles(ratios: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else list(ratios) * 3
    return low, middle, high


def row(workload: Workload, variant: str, times: Iterable[Pair], budget: float | None = None, observed: Sequence[bool] = ()) -> Row:
    times = list(times)
    low, middle, high = quartiles([own.cpu_ms / bare.cpu_ms for own, bare in times])
    wall_low, wall_middle, wall_high = quartiles([own.wall_ms / bare.wall_ms for own, bare in times])
    return Row(
        workload.name, variant, statistics.median(own.cpu_ms for own, _ in times), middle, low, high, wall_middle, wall_low, wall_high,
        len(times), budget, sum(observed) / len(observed) if observed else None,
    )  # fmt: skip


def settle(workload: Workload, training: Training, watcher: Sonde) -> int:
    """Train until the cost of the start is made up for; return the number of steps that took."""
    at_least, at_most = SETTLING_TURNS
    for number in range(at_most):
        turn(training, watcher, workload.chunk, workload.num_warm)
        observed = watcher.observed()
        first_plain = observed.index(False) if False in observed else len(observed)
        if number + 1 >= at_least and any(observed[first_plain:]):
            break
    return len(watcher.observed())


def sonde_rows(workload: Workload, scratch: Path, num_rounds: int) -> Iterator[Row]:
    # Of two equal trainings the one that was created first is slower, by 1 % on the MLP: so there is a bare one on either side.
    first, again, everything, default, last = (Training(workload) for _ in range(5))
    all_watcher, default_watcher = Sonde(everything, scratch, every=1), Sonde(default, scratch, every=None)
    num_settling = settle(workload, default, default_watcher)
    trainings = [(again, Watcher(), workload.chunk), (everything, all_watcher, workload.chunk), (default, default_watcher, workload.chunk)]
    num_slices = workload.chunk // workload.num_in_slice
    again_times, every_times, default_times = take_turns(workload, trainings, (first, last), num_rounds, num_slices)
    all_watcher.close()
    default_watcher.close()
    yield row(workload, BARE, [(bare, bare) for _, bare in every_times])
    yield row(workload, "bare, another one", again_times)
    yield row(workload, "Sonde, everything, every step", every_times, workload.every_budget, all_watcher.observed())
    observed = default_watcher.observed()[num_settling:]
    yield row(workload, "Sonde, default", default_times, workload.default_budget, observed)


def fresh_row(workload: Workload, scratch: Path, num_steps: int, num_runs: int) -> Row:
    """The default over a run from its first step, attaching and closing included: whole runs, each between two bare ones."""
    Training(workload).step()  # torch's own first step is slow
    times, observed = list[Pair](), list[bool]()
    before, _ = whole_run(workload, num_steps)
    for _ in range(num_runs):
        own, run = whole_run(workload, num_steps, to=tempfile.mkdtemp(dir=scratch))
        after, _ = whole_run(workload, num_steps)
        times.append((own, mean([before, after])))
        before = after
        assert run is not None
        observed += [bool(value) for value in sonde.Run(run).scalar("observed")[1]]
    return row(workload, "Sonde, default, a run from its start", times, observed=observed)


def whole_run(workload: Workload, num_steps: int, to: str | None = None) -> tuple[Time, Path | None]:
    """Time per step of a whole run, and its directory; without `to` it is bare."""
    gc.collect()
    training, run = Training(workload), None
    cpu_s, wall_s = process_time(), perf_counter()
    if to is None:
        for _ in range(num_steps):
            training.step()
    else:
        with sonde.watch(training.model, training.optimizer, to=to, strict=True) as session:
            for _ in range(num_steps):
                training.step()
        run = session.run
    return Time((process_time() - cpu_s) * 1e3 / num_steps, (perf_counter() - wall_s) * 1e3 / num_steps), run


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
    wall = "1" if row.variant == BARE else f"{row.wall_ratio:.3f} ({row.wall_low:.3f}–{row.wall_high:.3f})"
    numbers = f"{'':9}  {'':22}  {'':22}" if row.note else f"{row.step_ms:9.2f}  {spread:>22}  {wall:>22}"
    print(f"{row.workload:12} {row.variant:38}{numbers}  {row.verdict}".rstrip(), flush=True)


HEADING = f"{'':51}{'ms a step':>9}  {'CPU ratio (quartiles)':>22}  {'wall ratio (quartiles)':>22}"


def table(rows: Sequence[Row]) -> str:
    """All rows in Markdown, a column per workload, as in the README: CPU ratio / wall ratio. Of several runs, the one with the higher
    CPU ratio."""
    names = list(dict.fromkeys(row.workload for row in rows))
    by_place: dict[tuple[str, str], Row] = {}
    for row in rows:
        by_place[row.variant, row.workload] = max(by_place.get((row.variant, row.workload), row), row, key=lambda each: each.ratio)

    def cell(variant: str, name: str) -> str:
        row = by_place.get((variant, name))
        if row is None or row.note:
            return row.note if row else "–"
        if variant == BARE:
            return f"1 ({row.step_ms:.1f} ms)"
        return f"{row.ratio:.2f} / {row.wall_ratio:.2f}" + (f" (budget {row.budget:.2f})" if row.budget else "")

    titles = {workload.name: workload.title for workload in WORKLOADS}
    lines = [["", *(titles[name] for name in names)], ["---"] * (len(names) + 1)]
    lines += [[variant, *(cell(variant, name) for name in names)] for variant in dict.fromkeys(row.variant for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure(
    workloads: Sequence[Workload], scratch: Path, *, num_rounds: int, num_runs: int, quick: bool, with_peers: bool
) -> Iterator[Row]:
    """Sonde on all workloads, then the peers, which leave imports and threads behind."""
    for run in range(1, num_runs + 1):
        for workload in workloads:
            for each in sonde_rows(workload, scratch, num_rounds):
                yield replace(each, run=run)
    for workload in workloads:
        is_fast = workload.chunk > 20
        if is_fast or not quick:
            yield fresh_row(workload, scratch, FRESH_STEPS, num_runs=min(num_rounds, 5) if is_fast else 1)
    for workload in workloads if with_peers else ():
        yield from peer_rows(workload, scratch, 2 if quick else 5)


def main() -> int:
    parser = argparse.ArgumentParser(description="What watching costs, as a ratio of time to the bare training.")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parser.add_argument("--only", choices=[workload.name for workload in WORKLOADS], action="append", help="this workload; may be repeated")
    parser.add_argument("--no-peers", action="store_true", help="Sonde alone")
    parser.add_argument("--quick", action="store_true", help="few rounds, one run: a first look; budgets are not judged")
    parser.add_argument("--rounds", type=int, help=f"turns of each (default: {MIN_ROUNDS}, which judging a budget takes)")
    parser.add_argument("--runs", type=int, help=f"times that Sonde is measured (default: {NUM_RUNS}, which judging a budget takes)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    arguments = parser.parse_args()
    prepare(arguments.threads)
    workloads = [workload for workload in WORKLOADS if not arguments.only or workload.name in arguments.only]
    num_rounds = arguments.rounds or (3 if arguments.quick else MIN_ROUNDS)
    num_runs = arguments.runs or (1 if arguments.quick else NUM_RUNS)
    print(f"{facts()}\n\n{HEADING}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for each in measure(
            workloads, Path(scratch), num_rounds=num_rounds, num_runs=num_runs, quick=arguments.quick, with_peers=not arguments.no_peers
        ):
            show(each)
            rows.append(each)
    print("\n" + table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts(), "rows": [asdict(each) for each in rows]}, indent=1) + "\n")
    num_over = sum(each.is_over for each in rows)
    if num_rounds < MIN_ROUNDS or num_runs < NUM_RUNS:
        print(f"\nno verdict on budgets: that takes {NUM_RUNS} runs of at least {MIN_ROUNDS} rounds")
    if num_over:
        print(f"\n{num_over} over budget")
    elif num_rounds >= MIN_ROUNDS and num_runs >= NUM_RUNS:
        print("\nall budgets hold")
    return 1 if num_over else 0


if __name__ == "__main__":
    sys.exit(main())
