"""Trying changes on a script: all of them once, the promising ones again, and what helped together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

from sonde.errors import Stopped
from sonde.tuning.messages import Request
from sonde.tuning.proposals import Proposal, chosen_families, propose
from sonde.tuning.ranking import LEAST_GAIN
from sonde.tuning.trial_processes import Processes
from sonde.tuning.trial_runner import TIME_LIMIT_S, WARMUP, Bench, OutOfTime, Progress, name_of
from sonde.tuning.tuning_result import ORDER, Measured, Tuning

SECONDS = 3.0  # that one trial measures, if nobody says how many steps
REPEATS = 3  # of what looks good: three in a row are hardly luck
MORE_REPEATS = 4  # of what may be faster or not: a noisy machine needs more of them
FOR_SCREENING, FOR_REPEATING = 0.5, 0.8  # of the time, so that some is left for what comes after
BETWEEN = 2  # trials between two of the unchanged script
NEARLY = 0.9  # of the speed of the best of its family: what is slower is not measured again


def tune(
    script: str,
    args: Sequence[str] = (),
    *,
    module: bool = False,
    only: Sequence[str] = (),
    steps: int = 0,
    repeats: int = REPEATS,
    time_limit_s: float = TIME_LIMIT_S,
    progress: Progress = lambda *_: None,
    processes: Processes | None = None,
) -> Tuning:
    """Measure what would make `script` faster.

    The script's first steps run once per trial, in a process of its own, up to `steps` measured ones (0: three seconds of them). `only`
    names families of changes, see `FAMILIES`. Nothing in the script is changed; what it prints is kept in the result's `folder`. Where
    `processes` are handed over, they are used and left running.
    """
    families = chosen_families(only)
    began, load = monotonic(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    request = Request(script, list(args), module, {}, 0, WARMUP, steps, SECONDS, "", "", "")
    tried: dict[str, tuple[Proposal, ...]] = {}
    together: list[tuple[Proposal, ...]] = []
    with nullcontext(processes) if processes else Processes(Path(tempfile.mkdtemp(prefix="sonde-tune-"))) as running:
        bench = Bench(running, request, began + time_limit_s, progress)
        try:
            bench.first()
        except KeyboardInterrupt:
            raise Stopped(f"stopped by you before {script} had been measured as it is; there is nothing to show yet.") from None
        proposals, why_not = propose(bench.survey, families)
        stages: tuple[tuple[float, Callable[[], None]], ...] = (
            (FOR_SCREENING, lambda: _in_turn(bench, [(each,) for each in proposals], tried)),
            (FOR_REPEATING, lambda: _repeat(bench, tried, repeats)),
            (1.0, lambda: _combine(bench, [bench.result(each) for each in tried.values()], repeats, together)),
            # What was kept back for repeats and nobody needed.
            (1.0, lambda: _in_turn(bench, [(each,) for each in proposals if name_of((each,)) not in tried], tried)),
        )
        stopped = ""
        try:
            for share, stage in stages:
                bench.deadline = began + share * time_limit_s
                try:
                    stage()
                except OutOfTime:
                    stopped = "time"
        except KeyboardInterrupt:
            stopped = "interrupted"
        results = sorted((bench.result(each) for each in tried.values()), key=_rank)
        return Tuning(
            script=script,
            args=tuple(args),
            baseline=bench.summary(),
            results=tuple(results),
            together=tuple(bench.result(each) for each in together),
            why_not=why_not,
            untried=tuple(each.change for each in proposals if name_of((each,)) not in tried),
            stopped=stopped,
            num_trials=bench.num_trials,
            elapsed_s=monotonic() - began,
            load_per_core=load / bench.survey.num_cores,
            folder=running.folder,
        )


def _in_turn(bench: Bench, candidates: Sequence[tuple[Proposal, ...]], tried: dict[str, tuple[Proposal, ...]]) -> None:
    """Each once, the unchanged script between them and at the end."""
    candidates = [each for each in candidates if not bench.has_failed(name_of(each))]
    bench.num_planned = bench.num_trials + len(candidates) + -(-len(candidates) // BETWEEN)
    for number, proposals in enumerate(candidates, 1):
        bench.measure(proposals)
        tried[name_of(proposals)] = proposals
        if number % BETWEEN == 0 or number == len(candidates):
            bench.baseline()


def _repeat(bench: Bench, tried: dict[str, tuple[Proposal, ...]], repeats: int) -> None:
    """What may be faster is measured again: `repeats` times in all, and more often where that does not settle it."""
    promising = _promising([bench.result(each) for each in tried.values()], bench.noise)
    for _ in range(repeats - 1):
        _in_turn(bench, [each.proposals for each in promising], tried)
    for _ in range(MORE_REPEATS if repeats > 1 else 0):
        results = [bench.result(each.proposals) for each in promising]
        open_ones = [each for each in results if each.standing == "noise" and _factor(each) > 1 + LEAST_GAIN]
        if not open_ones:
            return
        _in_turn(bench, [each.proposals for each in open_ones], tried)


def _promising(results: Iterable[Measured], noise: float) -> list[Measured]:
    """What may be faster by one look at it, without those that are clearly behind another one of their family."""
    good = [each for each in results if each.gain is not None and each.gain.factor > 1 + LEAST_GAIN - noise]
    best: dict[str, float] = {}
    for each in good:
        family = each.proposals[0].family
        best[family] = max(best.get(family, 0.0), _factor(each))
    return [each for each in good if _factor(each) >= NEARLY * best[each.proposals[0].family]]


def _best_of_families(results: Iterable[Measured]) -> list[Measured]:
    """One of each family: the surest that leaves the training as it is. The best gain first."""
    best: dict[str, Measured] = {}
    for each in results:
        family = each.proposals[0].family
        if each.standing == "recommended" and (family not in best or each.sureness > best[family].sureness):
            best[family] = each
    return sorted(best.values(), key=_factor, reverse=True)


def _combine(bench: Bench, results: Sequence[Measured], repeats: int, together: list[tuple[Proposal, ...]]) -> None:
    """All that helped at once. Changes may be in each other's way: while one alone is clearly better, the weakest is left out."""
    helpful = _best_of_families(results)
    while len(helpful) > 1:
        proposals = tuple(proposal for each in helpful for proposal in each.proposals)
        bench.num_planned = bench.num_trials + 2 * repeats
        for _ in range(repeats):
            bench.measure(proposals)
            if proposals not in together:
                together.append(proposals)
            if bench.has_failed(name_of(proposals)):
                break
            bench.baseline()
        alone = helpful[0].gain
        if alone is None or _factor(bench.result(proposals)) >= alone.low:
            return
        helpful = helpful[:-1]


def _factor(measured: Measured) -> float:
    return measured.gain.factor if measured.gain is not None else 0.0


def _rank(measured: Measured) -> tuple[int, float]:
    return ORDER.index(measured.standing), -_factor(measured)
