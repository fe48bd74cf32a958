"""The training waits for its data.

What it finds    a DataLoader that delivers batches more slowly than the model could use them.
Why it matters   while the loop waits, nothing is computed: the same training could be done in a part of the time.
How it knows     the time between asking a DataLoader for a batch and getting it, median over settled steps, beside the rest of the
                 step. In a step that was looked at closely it is seen whether the loading computes or waits (for a disk, a network).
                 The gain is what remains when loading and computing overlap: with n workers a step takes the longer of the
                 computing and an n-th of the loading. Workers that compute need cores of their own, so no more are counted
                 than there are cores left.
Known problems   data that is made in the loop without a DataLoader is not seen as data; python-bound or a slow line may speak of
                 it. Workers that are short-lived (no persistent_workers) cost at the start of every epoch, which is counted here
                 too. pin_memory matters on a device alone, and is only mentioned.
Fix              give the DataLoader workers (num_workers), keep them (persistent_workers=True), or do per-sample work once before
                 the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any, ClassVar

from sonde.events import Finding, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import Timing, Xrays, severity, with_gain
from sonde.rules.words import amount, number

FEWEST_WORKERS = 2  # proposed: one alone hands over in fits and starts
COMPUTES = 0.5  # share of the loading that is computing, from which on workers need cores
OVERLAP = 0.8  # of the ideal gain is promised: batches still have to be handed over
RESTARTS = 0.5  # share of the data time that comes in single long waits: then starting workers is what costs


@dataclass(slots=True)
class InputBound:
    name: ClassVar[str] = "input-bound"
    explains: ClassVar[tuple[str, ...]] = ("python-bound", "slow-step-outliers")

    timing: Timing = field(default_factory=Timing)
    xrays: Xrays = field(default_factory=Xrays)
    loader: Mapping[str, Any] = field(default_factory=dict)  # the first that was started, which is that of the training

    def see(self, step: Step) -> None:
        self.timing.see(step)
        self.xrays.see(step)
        for event in step.events:
            if event.kind == "source" and event.data.get("call") == "loader" and not self.loader:
                self.loader = event.data

    def answer(self) -> Answer:
        timing = self.timing
        if reason := timing.too_short():
            return NotEvaluated(reason)
        workers = int(amount(self.loader, "num_workers"))
        share = timing.share("data")
        usual = timing.usual_ms("data")
        rest = max(timing.usual_ms() - usual, 1e-6)
        restarts = workers and not self.loader.get("persistent_workers")
        if restarts and usual * timing.num < (1 - RESTARTS) * timing.totals["data"]:
            gain, advice = OVERLAP * share, "keep the workers from epoch to epoch: DataLoader(..., persistent_workers=True)"
            wanted = workers
        else:
            wanted, step_ms = self._with_workers(workers, usual, rest)
            gain = OVERLAP * max(0.0, 1 - step_ms / (usual + rest)) * timing.training_share
            advice = f"load in parallel: DataLoader(..., num_workers={wanted}, persistent_workers=True)"
            if self._computes:
                advice += ", or compute once, before the training, what is the same in every epoch"
        if not timing.worth(gain):
            return Clear()
        line, text = str(self.loader.get("line", "")), str(self.loader.get("text", ""))
        at = f" of the DataLoader at {line}" if line else ""
        having = f"it has {workers} workers" if workers else "it loads in the process that trains (num_workers=0)"
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where="",
                step=timing.first_step,
                cause=f"{100 * share:.0f} % of the time the training waits for data{at}: {number(usual)} ms of a usual step, beside "
                f"{number(rest)} ms of everything else; {having}",
                fix=with_gain(advice, gain),
                evidence={
                    "gain": gain, "data_share": share, "data_ms": usual, "rest_ms": rest, "num_workers": workers, "wanted_workers": wanted,
                    **({"loading_computes_share": self._computing} if self.xrays.regular else {}),
                    **({"source": line, "source_text": text} if line else {}),
                },
            )
        ]  # fmt: skip

    @property
    def _computing(self) -> float:
        """Share of the loading in which a core was used."""
        shares = [amount(x, "fetch_cpu_ms") / amount(x, "fetch_ms") for x in self.xrays.regular if amount(x, "fetch_ms") > 0]
        return median(shares) if shares else 1.0

    @property
    def _computes(self) -> bool:
        return self._computing >= COMPUTES

    def _with_workers(self, workers: int, usual: float, rest: float) -> tuple[int, float]:
        """How many workers would do, and how long a step would take with them."""
        # With workers the wait is what is left of the loading after the rest; each takes so long for a batch:
        loading = workers * (usual + rest) if workers else usual
        cores = int(amount(self.xrays.machine, "cores")) or 1
        # Those that compute need cores, and the training needs one; those that wait do not, but torch warns of more than there are cores.
        most = cores - 1 if workers or self._computes else max(cores, FEWEST_WORKERS)
        wanted = min(max(ceil(1.25 * loading / rest), FEWEST_WORKERS), most)
        return (wanted, max(rest, loading / wanted)) if wanted > workers else (workers, usual + rest)
