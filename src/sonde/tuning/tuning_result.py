"""The result of `tune`, as plain values for views and JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sonde.tuning.measured_gain import Gain, LossCheck
from sonde.tuning.proposals import Proposal

SCHEMA = 1
ORDER = ("recommended", "departs", "other", "noise", "slower", "failed")


@dataclass(frozen=True, slots=True)
class BaselineSpeed:
    """Speed of the unchanged script."""

    step_ms: float
    steps_per_s: float
    samples_per_s: float  # 0 without a DataLoader
    waiting_share: float  # of the time spent waiting for batches
    num_steps: int  # measured per trial
    num_runs: int
    noise_share: float
    loss_noise_share: float  # difference of its losses between runs; 0: identical


@dataclass(frozen=True, slots=True)
class MeasuredChange:
    """One proposal, or several together, with speed and losses."""

    proposals: tuple[Proposal, ...]
    gain: Gain | None  # None: it failed
    loss: LossCheck
    step_ms: float = 0.0
    start_s: float = 0.0  # additional time to start, once
    pays_off_after: int = 0  # steps after which a slow start is compensated
    error: str = ""

    @property
    def name(self) -> str:
        return "+".join(proposal.name for proposal in self.proposals)

    @property
    def same_training(self) -> bool:
        return all(proposal.same_training for proposal in self.proposals)

    @property
    def standing(self) -> str:
        """One of `ORDER`: "departs" and "other" are faster, but the losses or the batches are not the same."""
        if self.gain is None:
            return "failed"
        if self.gain.verdict != "faster":
            return self.gain.verdict
        if not self.same_training:
            return "other"
        return "departs" if self.loss.kind == "departs" else "recommended"

    @property
    def reliability(self) -> tuple[bool, float]:
        """Sort key of the recommendation: repeated or not, then the worst comparison. With noise, the best median is luck."""
        return (self.gain.num_runs > 1, self.gain.low) if self.gain is not None else (False, 0.0)

    def to_dict(self) -> dict[str, Any]:
        changes = [
            {"family": each.family, "change": each.change, "line": each.site.line, "text": each.site.text, "note": each.note}
            for each in self.proposals
        ]
        return {
            "name": self.name, "standing": self.standing, "changes": changes, "gain": None if self.gain is None else asdict(self.gain),
            "loss": asdict(self.loss), "step_ms": self.step_ms, "start_s": self.start_s, "pays_off_after": self.pays_off_after,
            "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tuning:
    """All changes that were tried, best first, and the measured combinations."""

    script: str
    args: tuple[str, ...]
    baseline: BaselineSpeed
    results: tuple[MeasuredChange, ...]
    together: tuple[MeasuredChange, ...]  # combinations in the order of trying
    not_applicable: dict[str, str]  # families without a proposal
    untried: tuple[str, ...]  # proposals for which there was no time
    stopped: str  # "", "time" or "interrupted"
    num_trials: int
    elapsed_s: float
    load_per_core: float  # load of the machine at the start: above 1 it is busy with other work
    folder: Path  # output of the script

    @property
    def recommended(self) -> MeasuredChange | None:
        """The most reliable change or combination that keeps the training the same; None if nothing helps."""
        good = [each for each in (*self.results, *self.together) if each.standing == "recommended"]
        return max(good, key=lambda each: each.reliability, default=None)

    def to_dict(self) -> dict[str, Any]:
        best = self.recommended
        return {
            "schema": SCHEMA, "script": self.script, "args": list(self.args), "baseline": asdict(self.baseline),
            "recommended": None if best is None else best.to_dict(), "results": [each.to_dict() for each in self.results],
            "together": [each.to_dict() for each in self.together], "not_applicable": self.not_applicable, "untried": list(self.untried),
            "stopped": self.stopped, "num_trials": self.num_trials, "elapsed_s": self.elapsed_s, "load_per_core": self.load_per_core,
            "output": str(self.folder),
        }  # fmt: skip
