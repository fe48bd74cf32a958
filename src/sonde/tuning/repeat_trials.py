"""Runs trials within a deadline and computes the result of each change from them."""

import functools
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from time import monotonic

from sonde.errors import SondeError
from sonde.tuning.measured_gain import LossCheck, compare_losses, gain_of, noise_of, ratios
from sonde.tuning.proposals import Patch, Proposal
from sonde.tuning.start_trial_processes import TrialProcesses, last_line
from sonde.tuning.trial_messages import MIN_STEPS, Survey, Trial, TrialRequest
from sonde.tuning.tuning_result import BaselineSpeed, MeasuredChange

BASELINE = ""  # name of the unchanged script among the trials
WARMUP = 5  # steps: allocators, caches and lazily created state settle in the first few
PREFETCHED = 2  # batches per worker that are ready at the start and must be used up before the loader's own speed shows
MIN_LIMIT_S = 60.0  # for one trial
TIME_LIMIT_S = 600.0  # for all trials, by default
PATIENCE = 5  # times the duration of the unchanged script: then a trial is killed
COMPILING_S = 300.0  # added for a change that compiles

Progress = Callable[[str, int, int, int, int], None]  # name, trial, number of trials, step, number of steps


class OutOfTime(Exception):
    """The time limit does not allow for another trial."""


@dataclass(slots=True)
class TrialRunner:
    """Runs trials in order and stores their results."""

    processes: TrialProcesses
    request: TrialRequest
    deadline: float
    progress: Progress
    num_planned: int = 1
    num_trials: int = 0
    survey: Survey = field(default_factory=Survey)
    _sequence: list[tuple[str, float]] = field(default_factory=list)
    _trials: dict[str, list[Trial]] = field(default_factory=dict)
    _by_samples: bool = False
    _wall_s: float = 0.0

    def run_first(self) -> None:
        """Run the unchanged script for the first time: survey its parts and decide how many steps each trial measures."""
        trial = self._run(BASELINE, Patch(), limit_s=self.deadline - monotonic())
        if not trial.is_usable:
            raise SondeError(_error_message(self.request.target, trial))
        assert trial.survey is not None
        if trial.survey.world_size > 1:
            raise SondeError(f"{self.request.target} trains in {trial.survey.world_size} processes; `sonde tune` measures one.")
        self.survey, self._by_samples, self._wall_s = trial.survey, trial.num_samples > 0, trial.wall_s
        workers = max((loader.num_workers for loader in self.survey.feeding), default=0)
        self.request = replace(self.request, num_steps=trial.num_steps, num_models=len(self.survey.models), warmup=_warmup(workers))
        if self.request.warmup > WARMUP:
            self.run_baseline()  # again, with the longer warm-up for its workers
        else:
            self._add(BASELINE, trial)

    def run_baseline(self) -> None:
        trial = self._run_in_time(BASELINE, Patch())
        if not trial.is_usable:
            raise SondeError(
                f"{self.request.target} ran once, but failed the second time: {_failure(trial)}.\n"
                "Each change is tried in a run of its own, so the script must be able to run repeatedly. Does it refuse existing output?\n"
                f"Its output: {trial.log}"
            )
        self._add(BASELINE, trial)

    def measure(self, proposals: tuple[Proposal, ...]) -> None:
        """Run one trial with these changes together."""
        patch = functools.reduce(operator.or_, (proposal.patch for proposal in proposals))
        name = name_of(proposals)
        self._add(name, self._run_in_time(name, patch, slow_start=any(proposal.slow_start for proposal in proposals)))

    def has_failed(self, name: str) -> bool:
        return any(not trial.is_usable for trial in self._trials.get(name, ()))

    def result(self, proposals: tuple[Proposal, ...]) -> MeasuredChange:
        """The result of a change from all of its trials so far."""
        name = name_of(proposals)
        trials = self._trials[name]
        failed = next((trial for trial in trials if not trial.is_usable), None)
        if failed is not None:
            return MeasuredChange(proposals, None, LossCheck("unknown"), error=_failure(failed))
        unchanged = self._trials[BASELINE]
        gain, loss = gain_of(ratios(self._sequence, name, BASELINE), self.noise), LossCheck("unknown")
        if all(proposal.same_training for proposal in proposals):
            checks = [compare_losses(unchanged[0].losses, trial.losses, self.loss_noise) for trial in trials]
            loss = max(checks, key=lambda check: check.difference)
        measured = MeasuredChange(proposals, gain, loss, step_ms=1e3 / median(trial.steps_per_s for trial in trials))
        if any(proposal.slow_start for proposal in proposals):
            # Only the first trial compiles; the others read torch's cache.
            start_s = max(trials[0].warmup_s - median(t.warmup_s for t in unchanged), 0.0)
            saved_s = (1 - 1 / gain.factor) / median(t.steps_per_s for t in unchanged)
            return replace(measured, start_s=start_s, pays_off_after=round(start_s / saved_s) if saved_s > 0 else 0)
        return measured

    @property
    def noise(self) -> float:
        return noise_of([speed for name, speed in self._sequence if name == BASELINE])

    @property
    def loss_noise(self) -> float:
        first, *others = self._trials[BASELINE]
        return max((compare_losses(first.losses, other.losses).difference for other in others), default=0.0)

    def summary(self) -> BaselineSpeed:
        trials = self._trials[BASELINE]
        return BaselineSpeed(
            step_ms=1e3 / median(t.steps_per_s for t in trials), steps_per_s=median(t.steps_per_s for t in trials),
            samples_per_s=median(t.samples_per_s for t in trials), waiting_share=median(t.waited_s / t.seconds for t in trials),
            num_steps=self.request.num_steps, num_runs=len(trials), noise_share=self.noise, loss_noise_share=self.loss_noise,
        )  # fmt: skip

    def _run(self, name: str, patch: Patch, *, limit_s: float) -> Trial:
        workers = max(patch.num_workers, *(loader.num_workers for loader in self.survey.feeding), 0)
        request = replace(self.request, patch=asdict(patch), warmup=max(self.request.warmup, _warmup(workers)))
        what = name or "the unchanged script"
        self.num_trials += 1
        self.num_planned = max(self.num_planned, self.num_trials)
        number, num_steps = self.num_trials, request.num_steps and request.warmup + request.num_steps

        def tick(step: int) -> None:
            self.progress(what, number, self.num_planned, step, num_steps)

        tick(0)
        return self.processes.run(request, name=name.replace("=", "-") or "baseline", limit_s=limit_s, tick=tick)

    def _run_in_time(self, name: str, patch: Patch, *, slow_start: bool = False) -> Trial:
        left_s = self.deadline - monotonic()
        if left_s < self._wall_s:
            raise OutOfTime
        limit_s = max(PATIENCE * self._wall_s, MIN_LIMIT_S) + (COMPILING_S if slow_start else 0.0)
        trial = self._run(name, patch, limit_s=min(limit_s, left_s))
        if trial.outcome == "stuck" and left_s < limit_s:
            raise OutOfTime  # the limit was shortened by the deadline, so the change is not to blame
        return trial

    def _add(self, name: str, trial: Trial) -> None:
        self._trials.setdefault(name, []).append(trial)
        if trial.is_usable:
            self._sequence.append((name, trial.samples_per_s if self._by_samples else trial.steps_per_s))


def name_of(proposals: tuple[Proposal, ...]) -> str:
    return "+".join(proposal.name for proposal in proposals)


def _warmup(num_workers: int) -> int:
    return max(WARMUP, PREFETCHED * num_workers + 1)


def _failure(trial: Trial) -> str:
    return f"it ended after {trial.total_steps} steps" if trial.outcome == "ended" else trial.error


def _error_message(target: str, trial: Trial) -> str:
    last = last_line(Path(trial.log))
    output = f"\nIts last line: {last}\nIts output: {trial.log}" if last else ""
    if trial.outcome == "failed":
        when = f"at step {trial.total_steps}" if trial.total_steps else "before its first step"
        return (
            f"{target} failed {when}, as it is: {trial.error}.\nMake it run first; try: sonde run {target}\n"
            f"(Options of sonde tune come before the script, those of the script after it.){output}"
        )
    if trial.outcome == "stuck":
        return (
            f"{target}, as it is, was {trial.error}, and nothing is left of the time limit.\n"
            f"Give it more time, as in --time-limit {TIME_LIMIT_S:.0f}, or measure fewer steps: --steps {MIN_STEPS}.{output}"
        )
    if not trial.total_steps:
        return (
            f"{target} ended without training: no optimizer stepped in its process.\n"
            f"Does it need arguments? They follow the script: sonde tune {target} --epochs 1{output}"
        )
    return (
        f"{target} ended after {trial.total_steps} steps; {WARMUP} to warm up and {MIN_STEPS} to measure are needed.\n"
        f"Let it train longer, by its own arguments: sonde tune {target} --epochs 3{output}"
    )
