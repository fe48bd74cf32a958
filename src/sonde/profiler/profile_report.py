"""A profile as a value. Times are milliseconds per step, with the quartiles over the steps that were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sonde.profiler.profile_comparison import ProfileComparison
    from sonde.profiler.recommendations import Bottleneck

PHASES = ("data", "forward", "backward", "optimizer", "other")
DISTURBED = 1.15  # a factor between the step and the sum of its parts: they agree within a few per cent on a quiet machine


class Spread(NamedTuple):
    """A time and how much it varies: the middle half of what was measured lies between `low_ms` and `high_ms`."""

    median_ms: float = math.nan
    low_ms: float = math.nan
    high_ms: float = math.nan
    num: int = 0  # steps that were measured; 0: nothing was, and all times are NaN

    @property
    def is_known(self) -> bool:
        return self.num > 0

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Spread:
        if not values_ms:
            return cls()
        if len(values_ms) == 1:
            return cls(values_ms[0], values_ms[0], values_ms[0], 1)
        low, middle, high = statistics.quantiles(values_ms, n=4, method="inclusive")
        return cls(middle, low, high, len(values_ms))


UNKNOWN = Spread()  # not measured


class Span(NamedTuple):
    """One stretch of time in one measured step, for a trace. Spans of one kind in one step are nested or apart, never crossed."""

    step: int
    kind: str  # "forward", "backward", "phase" or "section"
    name: str  # the path of the layer ("" is the model itself), or the name of the phase or section
    start_ms: float  # since the first measured step began
    duration_ms: float
    thread: int = 0  # 0 is the thread that trains


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one module costs in one step, over all of its calls. "Self" leaves out the modules that it calls; the rest includes them."""

    path: str  # "" is the model itself
    kind: str  # the name of its class
    depth: int = 0  # modules around it
    calls: float = 1.0  # in a step
    forward: Spread = UNKNOWN
    backward: Spread = UNKNOWN  # with what activation checkpointing computes again
    forward_self: Spread = UNKNOWN
    backward_self: Spread = UNKNOWN
    memory_bytes: int = 0  # activations that it keeps for the backward, once each; parameters, buffers and inputs of the model left out
    memory_self_bytes: int = 0
    parameter_bytes: int = 0
    flops_forward: int = 0  # multiplications and additions
    flops_backward: int = 0
    flops_self: int = 0  # forward and backward
    source: str = ""  # `model.py:12`: where its forward is written, for classes of the user

    @property
    def forward_self_ms(self) -> float:
        return self.forward_self.median_ms

    @property
    def backward_self_ms(self) -> float:
        return self.backward_self.median_ms

    @property
    def total_ms(self) -> float:
        """Forward and backward, with the modules inside. What was not measured counts for nothing."""
        return _sum(self.forward, self.backward)

    @property
    def self_ms(self) -> float:
        return _sum(self.forward_self, self.backward_self)

    @property
    def flops_per_s(self) -> float:
        """Of what it computes itself; 0 where it has no arithmetic that is counted."""
        return self.flops_self / self.self_ms * 1e3 if self.self_ms > 0 else 0.0


def _sum(*parts: Spread) -> float:
    known = [part.median_ms for part in parts if part.is_known]
    return math.fsum(known) if known else math.nan


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of the user's own code, measured by name."""

    name: str
    calls: int
    total_ms: float
    spread: Spread  # of one call
    parent: str = ""  # the section around it; "" is none


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Where the time of a step goes. What could not be told is NaN or None, and `notes` say why."""

    title: str = ""  # class of the model, or the script
    layers: tuple[LayerCost, ...] = ()  # in the order of their first calls; a module comes before those that it calls
    sections: tuple[Section, ...] = ()
    step: Spread = UNKNOWN  # the whole step, without the profiler
    phases: Mapping[str, Spread] = field(default_factory=dict)  # some of PHASES, without the profiler
    remainder: Mapping[str, float] = field(default_factory=dict)  # milliseconds of the step that are in no layer, by name
    num_samples: int | None = None  # in a batch
    num_tokens: int | None = None  # in a batch; None: the inputs are no tokens
    flops_per_step: int = 0
    peak_flops_per_s: float = math.nan  # measured on this machine, in the model's dtype
    utilisation: Mapping[str, float | str] = field(default_factory=dict)  # cpu_share, num_threads, num_cores, gpu_share …
    batch: str = ""  # `float32 [32, 64]`
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    own_cost: float = math.nan  # time of a profiled step over that of a bare one, measured in turns
    spans: tuple[Span, ...] = field(default=(), repr=False)  # of the first measured steps, for a trace

    @property
    def samples_per_s(self) -> float:
        return self._per_s(self.num_samples)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.num_tokens is None else self._per_s(self.num_tokens)

    @property
    def flops_per_s(self) -> float:
        """Achieved over the whole step."""
        return self._per_s(self.flops_per_step)

    @property
    def mfu(self) -> float:
        """The share of the measured peak that the step achieves (model FLOPs utilisation)."""
        return self.flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s > 0 else math.nan

    @property
    def accounted_ms(self) -> float:
        """What the layers themselves and the named remainder add up to; close to `step.median_ms`."""
        own = [layer.self_ms for layer in self.layers if math.isfinite(layer.self_ms)]
        return math.fsum((*own, *self.remainder.values()))

    def layer(self, path: str) -> LayerCost:
        """By its path; a KeyError names it."""
        return next((layer for layer in self.layers if layer.path == path), None) or _missing(path)

    def share(self, ms: float) -> float:
        """Of the whole step; of the sum of its parts where other programs kept the two from agreeing, or the step is not known."""
        whole, parts = self.step.median_ms, self.accounted_ms
        if not self.step.is_known or (self.layers and parts > 0 and not 1 / DISTURBED <= whole / parts <= DISTURBED):
            whole = parts
        return ms / whole if whole > 0 else math.nan

    def phase_share(self, phase: str) -> float:
        """Of what all phases take: together they are the step, also where medians of the one and of the others do not add up."""
        if phase not in self.phases or "other" not in self.phases:  # some are missing
            return self.share(self.phases[phase].median_ms) if phase in self.phases else math.nan
        whole = math.fsum(spread.median_ms for spread in self.phases.values() if spread.is_known)
        return self.phases[phase].median_ms / whole if whole > 0 else math.nan

    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """What takes most of the step, the largest first."""
        from sonde.profiler.recommendations import bottlenecks

        return bottlenecks(self)

    def recommendations(self) -> tuple[str, ...]:
        """What could be changed, with the numbers that speak for it."""
        from sonde.profiler.recommendations import recommendations

        return recommendations(self)

    def compare(self, other: ProfileReport) -> ProfileComparison:
        """This profile beside an earlier one, layer by layer: `new.compare(old)`."""
        from sonde.profiler.profile_comparison import compare

        return compare(before=other, after=self)

    def summary(self, *, width: int = 80) -> str:
        """A tree of layers with their times and shares, then bottlenecks and recommendations: as text for a terminal."""
        from sonde.views.profile_text import profile_text

        return profile_text(self, width=width)

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON: numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity"."""
        from sonde.profiler.profile_file import to_dict

        return to_dict(self)

    def save(self, path: str | Path, *, replace: bool = False) -> Path:
        """`.json`: all of it, which `load` reads again; `.html`: a page of flames; `.json.gz`, `.trace.json`: a trace for Perfetto."""
        from sonde.profiler.profile_file import save

        return save(self, path, replace=replace)

    @staticmethod
    def load(path: str | Path) -> ProfileReport:
        from sonde.profiler.profile_file import load

        return load(path)

    def _per_s(self, num: int | None) -> float:
        return num / self.step.median_ms * 1e3 if num is not None and self.step.median_ms > 0 else math.nan


def _missing(path: str) -> LayerCost:
    raise KeyError(path)
