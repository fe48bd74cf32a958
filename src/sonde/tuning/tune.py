"""`tune`: tries all changes on a script once, repeats the promising ones, then combines those that help."""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

from sonde.errors import Stopped
from sonde.tuning.measured_gain import MIN_GAIN
from sonde.tuning.proposals import Proposal, chosen_families, propose
from sonde.tuning.repeat_trials import TIME_LIMIT_S, WARMUP, OutOfTime, Progress, TrialRunner, name_of
from sonde.tuning.start_trial_processes import TrialProcesses
from sonde.tuning.trial_messages import TrialRequest
from sonde.tuning.tuning_result import ORDER, MeasuredChange, Tuning

SECONDS = 3.0  # measured per trial, unless a number of steps is requested
REPEATS = 3  # trials of a promising change: three good ones in a row are hardly luck
MORE_REPEATS = 4  # further trials of a change within the noise: a noisy machine needs more
FOR_SCREENING, FOR_REPEATING = 0.5, 0.8  # shares of the time limit at which these stages end
BETWEEN = 2  # trials between two baselines
NEARLY = 0.9  # of the best speed in its family: slower changes are not repeated


def tune(
    script: str, args: Sequence[str] = (), *, module: bool = False, only: Sequence[str] = (), steps: int = 0, repeats: int = REPEATS,
    time_limit_s: float = TIME_LIMIT_S, progress: Progress = lambda *_: None, processes: TrialProcesses | None = None,
) -> Tuning:  # fmt: skip
    """Measure which changes make `script` faster.

    Each trial runs the script's first steps in a process of its own. The file of the script is not modified; its output is in the result's
    `folder`.

    Args:
        only: families of changes, see `FAMILIES`; all if empty.
        steps: measured steps per trial; 0: three seconds of them.
        repeats: trials of each promising change.
        processes: used and left running if passed.
    """
    families = chosen_families(only)
    began, load = monotonic(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    request = TrialRequest(script, list(args), module, {}, 0, WARMUP, steps, SECONDS, "", "", "")
    tried: dict[str, tuple[Proposal, ...]] = {}
    together: list[tuple[Proposal, ...]] = []
    with nullcontext(processes) if processes else TrialProcesses(Path(tempfile.mkdtemp(prefix="sonde-tune-"))) as running:
        runner = TrialRunner(running, request, began + time_limit_s, progress)
        try:
            runner.run_first()
        except KeyboardInterrupt:
            raise Stopped(f"stopped before the unchanged {script} was measured; there are no results yet.") from None
        proposals, not_applicable = propose(runner.survey, families)
        stages: tuple[tuple[float, Callable[[], None]], ...] = (
            (FOR_SCREENING, lambda: _try_each(runner, [(each,) for each in proposals], tried)),
            (FOR_REPEATING, lambda: _repeat(runner, tried, repeats)),
            (1.0, lambda: _combine(runner, [runner.result(each) for each in tried.values()], repeats, together)),
            # Changes that were not tried in the first stage, in the time that repeating left.
            (1.0, lambda: _try_each(runner, [(each,) for each in proposals if name_of((each,)) not in tried], tried)),
        )
        stopped = ""
        try:
            for share, stage in stages:
                runner.deadline = began + share * time_limit_s
                try:
                    stage()
                except OutOfTime:
                    stopped = "time"
        except KeyboardInterrupt:
            stopped = "interrupted"
        results = sorted((runner.result(each) for each in tried.values()), key=_rank)
        return Tuning(
            script=script, args=tuple(args), baseline=runner.summary(), results=tuple(results),
            together=tuple(runner.result(each) for each in together), not_applicable=not_applicable,
            untried=tuple(each.change for each in proposals if name_of((each,)) not in tried), stopped=stopped,
            num_trials=runner.num_trials, elapsed_s=monotonic() - began, load_per_core=load / runner.survey.num_cores,
            folder=running.folder,
        )  # fmt: skip


def _try_each(runner: TrialRunner, candidates: Sequence[tuple[Proposal, ...]], tried: dict[str, tuple[Proposal, ...]]) -> None:
    """Try each candidate once, with baselines between them and at the end."""
    candidates = [each for each in candidates if not runner.has_failed(name_of(each))]
    runner.num_planned = runner.num_trials + len(candidates) + -(-len(candidates) // BETWEEN)
    for number, proposals in enumerate(candidates, 1):
        runner.measure(proposals)
        tried[name_of(proposals)] = proposals
        if number % BETWEEN == 0 or number == len(candidates):
            runner.run_baseline()


def _repeat(runner: TrialRunner, tried: dict[str, tuple[Proposal, ...]], repeats: int) -> None:
    """Repeat the promising changes: `repeats` trials in all, and more for those within the noise."""
    promising = _promising([runner.result(each) for each in tried.values()], runner.noise)
    for _ in range(repeats - 1):
        _try_each(runner, [each.proposals for each in promising], tried)
    for _ in range(MORE_REPEATS if repeats > 1 else 0):
        results = [runner.result(each.proposals) for each in promising]
        undecided = [each for each in results if each.standing == "noise" and _factor(each) > 1 + MIN_GAIN]
        if not undecided:
            return
        _try_each(runner, [each.proposals for each in undecided], tried)


def _promising(results: Iterable[MeasuredChange], noise: float) -> list[MeasuredChange]:
    """The changes that may be faster, without those that are clearly slower than another one of their family."""
    good = [each for each in results if _factor(each) > 1 + MIN_GAIN - noise]
    best: dict[str, float] = {}
    for each in sorted(good, key=_factor):
        best[each.proposals[0].family] = _factor(each)
    return [each for each in good if _factor(each) >= NEARLY * best[each.proposals[0].family]]


def _best_of_families(results: Iterable[MeasuredChange]) -> list[MeasuredChange]:
    """The most reliable recommended change of each family, by descending gain."""
    recommended = sorted((each for each in results if each.standing == "recommended"), key=lambda each: each.reliability, reverse=True)
    best: dict[str, MeasuredChange] = {}
    for each in recommended:
        best.setdefault(each.proposals[0].family, each)
    return sorted(best.values(), key=_factor, reverse=True)


def _combine(runner: TrialRunner, results: Sequence[MeasuredChange], repeats: int, together: list[tuple[Proposal, ...]]) -> None:
    """Try all helpful changes together. While the best one alone is clearly faster, the weakest is left out."""
    helpful = _best_of_families(results)
    while len(helpful) > 1:
        proposals = tuple(proposal for each in helpful for proposal in each.proposals)
        runner.num_planned = runner.num_trials + 2 * repeats
        for _ in range(repeats):
            runner.measure(proposals)
            if proposals not in together:
                together.append(proposals)
            if runner.has_failed(name_of(proposals)):
                break
            runner.run_baseline()
        alone = helpful[0].gain
        if alone is None or _factor(runner.result(proposals)) >= alone.low:
            return
        helpful = helpful[:-1]


def _factor(measured: MeasuredChange) -> float:
    return measured.gain.factor if measured.gain is not None else 0.0


def _rank(measured: MeasuredChange) -> tuple[int, float]:
    return ORDER.index(measured.standing), -_factor(measured)
