"""What `tune` answers with: plain values that views draw."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sonde.tuning.proposals import Proposal
from sonde.tuning.ranking import Gain, LossCheck

SCHEMA = 1
ORDER = ("recommended", "departs", "other", "noise", "slower", "failed")


@dataclass(frozen=True, slots=True)
class Baseline:
    """The script as it is."""

    step_ms: float
    steps_per_s: float
    samples_per_s: float  # 0: no DataLoader, so samples cannot be counted
    waiting_share: float  # of the time that goes into waiting for batches
    num_steps: int  # measured in each trial
    num_runs: int
    noise_share: float
    loss_noise_share: float  # how much its losses differ from run to run; 0: bit for bit the same


@dataclass(frozen=True, slots=True)
class Measured:
    """A proposal, or several together, and what came out."""

    proposals: tuple[Proposal, ...]
    gain: Gain | None  # None: it failed
    loss: LossCheck
    step_ms: float = 0.0
    start_s: float = 0.0  # how much longer it takes to start, once
    pays_off_after: int = 0  # steps, where it starts slowly and is faster then
    error: str = ""
    log: str = ""

    @property
    def name(self) -> str:
        return "+".join(proposal.name for proposal in self.proposals)

    @property
    def same_training(self) -> bool:
        return all(proposal.same_training for proposal in self.proposals)

    @property
    def standing(self) -> str:
        """One of `ORDER`: "departs" and "other" are faster, but the training is not the same."""
        if self.gain is None:
            return "failed"
        if self.gain.verdict != "faster":
            return self.gain.verdict
        if not self.same_training:
            return "other"
        return "departs" if self.loss.kind == "departs" else "recommended"

    @property
    def sureness(self) -> tuple[bool, float]:
        """By this the best is chosen: more than one look, then the worst comparison. With noise, the best median is a matter of luck."""
        return (self.gain.num_runs > 1, self.gain.low) if self.gain is not None else (False, 0.0)

    def to_dict(self) -> dict[str, Any]:
        changes = [
            {"family": each.family, "change": each.change, "line": each.place.line, "text": each.place.text, "note": each.note}
            for each in self.proposals
        ]
        return {
            "name": self.name, "standing": self.standing, "changes": changes, "gain": None if self.gain is None else asdict(self.gain),
            "loss": asdict(self.loss), "step_ms": self.step_ms, "start_s": self.start_s, "pays_off_after": self.pays_off_after,
            "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tuning:
    """Every change that was tried, the best first; `together` is the best combination, measured."""

    script: str
    args: tuple[str, ...]
    baseline: Baseline
    results: tuple[Measured, ...]
    together: tuple[Measured, ...]  # combinations in the order of trying
    why_not: dict[str, str]  # families without a proposal
    untried: tuple[str, ...]  # proposals for which there was no time
    stopped: str  # "", "time" or "interrupted"
    num_trials: int
    elapsed_s: float
    load_per_core: float  # of other work, when it began: above 1 the machine is busy without us
    folder: Path  # what the script printed

    @property
    def recommended(self) -> Measured | None:
        """The surest of those that keep the training as it is: a combination or a single change; None where nothing helps."""
        good = [each for each in (*self.results, *self.together) if each.standing == "recommended"]
        return max(good, key=lambda each: each.sureness, default=None)

    def to_dict(self) -> dict[str, Any]:
        best = self.recommended
        return {
            "schema": SCHEMA, "script": self.script, "args": list(self.args), "baseline": asdict(self.baseline),
            "recommended": None if best is None else best.to_dict(), "results": [each.to_dict() for each in self.results],
            "together": [each.to_dict() for each in self.together], "not_applicable": self.why_not, "untried": list(self.untried),
            "stopped": self.stopped, "num_trials": self.num_trials, "elapsed_s": self.elapsed_s, "load_per_core": self.load_per_core,
            "output": str(self.folder),
        }  # fmt: skip
