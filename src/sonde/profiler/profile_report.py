"""A profile as a value, and its file. Times are milliseconds per step, with the quartiles over the measured steps.

The file is one strict JSON document; numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import difflib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from sonde.errors import SondeError
from sonde.formatting import listing, strict
from sonde.profiler import recommendations
from sonde.render.safe_write import write_new

if TYPE_CHECKING:
    from sonde.profiler.profile_comparison import ProfileComparison

PHASES = ("data", "forward", "backward", "optimizer", "other")
BACKWARD_REMAINDER = LOSS_BACKWARD, ENGINE_START = "loss, backward", "autograd, before the first node"  # in the backward, in no layer
DISTURBED = 1.15  # ratio of the step to the sum of its parts: on an idle machine they agree within a few percent
TRACE_SUFFIXES = (".json.gz", ".trace.json")  # for Perfetto
SUFFIXES = (".json", ".html", *TRACE_SUFFIXES)
FORMAT = "sonde-profile"
SCHEMA = 2  # 2: times have percentiles and the fastest value


class TimeSpread(NamedTuple):
    """A time and its variation: the median, the quartiles `low_ms` and `high_ms`, and the latency percentiles `p50_ms` to `p99_ms`."""

    median_ms: float = math.nan
    low_ms: float = math.nan
    high_ms: float = math.nan
    num: int = 0  # measured steps or calls; 0: nothing was measured, and all times are NaN
    p95_ms: float = math.nan
    p99_ms: float = math.nan
    fastest_ms: float = math.nan  # other programs can only make a step longer

    @property
    def is_known(self) -> bool:
        return self.num > 0

    @property
    def p50_ms(self) -> float:
        return self.median_ms

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> TimeSpread:
        if not values_ms:
            return cls()
        ordered = sorted(values_ms)
        low, median, high, p95, p99 = (_quantile(ordered, share) for share in (0.25, 0.5, 0.75, 0.95, 0.99))
        return cls(median, low, high, len(ordered), p95, p99, ordered[0])


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two values nearest to that share, as numpy and `statistics.quantiles(method="inclusive")` define it."""
    index, part = divmod(share * (len(ordered) - 1), 1)
    below, above = ordered[int(index)], ordered[min(int(index) + 1, len(ordered) - 1)]
    return below if part == 0 else below + part * (above - below)


UNKNOWN = TimeSpread()  # not measured


class Span(NamedTuple):
    """One interval of one measured step, for a trace file. Spans of one kind in one step are nested or disjoint."""

    step: int
    kind: str  # "forward", "backward", "phase" or "section"
    name: str  # the path of the layer ("" is the model itself), or the name of the phase or section
    start_ms: float  # since the start of the first measured step
    duration_ms: float
    thread: int = 0  # 0 is the training thread


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one module costs in one step, over all of its calls. "Self" excludes the modules that it calls; the rest includes them."""

    path: str  # "" is the model itself
    kind: str  # the name of its class
    depth: int = 0  # number of modules around it
    calls: float = 1.0  # in a step
    forward: TimeSpread = UNKNOWN
    backward: TimeSpread = UNKNOWN  # including the recomputation of activation checkpointing
    forward_self: TimeSpread = UNKNOWN
    backward_self: TimeSpread = UNKNOWN
    memory_bytes: int = 0  # activations saved for the backward, counted once; without parameters, buffers and inputs of the model
    memory_self_bytes: int = 0
    parameter_bytes: int = 0
    flops_forward: int = 0  # multiplications and additions
    flops_backward: int = 0
    flops_self: int = 0  # forward and backward
    source: str = ""  # `model.py:12`: the line of its forward, for classes of the user
    latency: TimeSpread = UNKNOWN  # forward and backward of one step together
    is_recorded: bool = False  # timed by the user: FLOPs and the calls per step are not known, and times are those of one execution

    @property
    def total_ms(self) -> float:
        """Forward and backward, including the modules inside. NaN if neither was measured."""
        return _sum(self.forward, self.backward)

    @property
    def self_ms(self) -> float:
        """Forward and backward, without the modules inside. NaN if neither was measured."""
        return _sum(self.forward_self, self.backward_self)

    @property
    def call_ms(self) -> float:
        """One call of the layer itself."""
        return self.self_ms if self.is_recorded else self.self_ms / self.calls if self.calls else math.nan

    @property
    def flops_per_s(self) -> float:
        """Of the layer itself, without the modules inside; 0 if none of its operations has a FLOP formula."""
        return self.flops_self / self.self_ms * 1e3 if self.self_ms > 0 else 0.0


def _sum(*parts: TimeSpread) -> float:
    known = [part.median_ms for part in parts if part.is_known]
    return math.fsum(known) if known else math.nan


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the user's own code, timed by name."""

    name: str
    calls: int
    total_ms: float
    spread: TimeSpread  # of one call
    parent: str = ""  # the section around it; "" if there is none


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Where the time of a training step goes. Unknown values are NaN or None, and `notes` give the reason."""

    title: str = ""  # class of the model, or the script
    layers: tuple[LayerCost, ...] = ()  # in the order of their first calls; a module comes before those that it calls
    sections: tuple[Section, ...] = ()
    step: TimeSpread = UNKNOWN  # the whole step, without the profiler
    phases: Mapping[str, TimeSpread] = field(default_factory=dict)  # some of PHASES, without the profiler
    remainder: Mapping[str, float] = field(default_factory=dict)  # milliseconds of the step that belong to no layer, by name
    num_samples: int | None = None  # per step
    num_tokens: int | None = None  # per step; None: the inputs are not tokens
    flops_per_step: int = 0
    peak_flops_per_s: float = math.nan  # measured on this machine, in the model's dtype
    utilisation: Mapping[str, float | str] = field(default_factory=dict)  # cpu_share, num_threads, num_cores, gpu_share …
    batch: str = ""  # `float32 [32, 64]`
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    disturbed_share: float = math.nan  # share of the measured steps that other programs interrupted; undisturbed ones are preferred
    own_cost: float = math.nan  # duration of a timed step over that of a bare one; they were measured alternately
    spans: tuple[Span, ...] = field(default=(), repr=False)  # of the first measured steps, for a trace file

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs interrupted most of the measured steps: all times may be too long."""
        return self.disturbed_share > 0.5

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
        """Model FLOPs utilization: achieved FLOPs per second over the measured peak."""
        return self.flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s > 0 else math.nan

    @property
    def accounted_ms(self) -> float:
        """The sum of all layers (self) and the remainder; close to `step.median_ms`."""
        own = [layer.self_ms for layer in self.layers if math.isfinite(layer.self_ms)]
        return math.fsum((*own, *self.remainder.values()))

    def layer(self, path: str) -> LayerCost:
        """The layer with this path; "" is the model itself. Raises SondeError with the nearest paths if there is none."""
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise SondeError(f"no layer of this profile is named {path!r}.\n{_nearest(path, [each.path for each in self.layers if each.path])}")

    def share(self, ms: float) -> float:
        """`ms` as a share of the step; of the sum of its parts if other programs disturbed the step, or if the step is not known."""
        step_ms, parts_ms = self.step.median_ms, self.accounted_ms
        if not self.step.is_known or (self.layers and parts_ms > 0 and not 1 / DISTURBED <= step_ms / parts_ms <= DISTURBED):
            step_ms = parts_ms
        return ms / step_ms if step_ms > 0 else math.nan

    def phase_share(self, phase: str) -> float:
        """A phase as a share of all phases: together they are the step, even if their medians do not add up to its median."""
        if phase not in self.phases or "other" not in self.phases:  # some phases are missing
            return self.share(self.phases[phase].median_ms) if phase in self.phases else math.nan
        total_ms = math.fsum(spread.median_ms for spread in self.phases.values() if spread.is_known)
        return self.phases[phase].median_ms / total_ms if total_ms > 0 else math.nan

    def bottlenecks(self) -> tuple[recommendations.Bottleneck, ...]:
        """The layers and phases that take the largest shares of the step, the largest first."""
        return recommendations.bottlenecks(self)

    def recommendations(self) -> tuple[str, ...]:
        """Changes that could make the step faster, with the measured reasons."""
        return tuple(recommendations.recommendations(self))

    def compare(self, other: ProfileReport) -> ProfileComparison:
        """Compares this profile with an earlier one, layer by layer: `new.compare(old)`."""
        if not isinstance(other, ProfileReport):
            raise SondeError(
                f"compare takes another ProfileReport, not {_kind(other)}: new.compare(old).\n"
                'An earlier profile is read from its file with ProfileReport.load("old.json").'
            )
        from sonde.profiler.profile_comparison import compare

        return compare(before=other, after=self)

    def summary(self, *, width: int | None = None) -> str:
        """Text for a terminal: a tree of layers with times and shares, latencies, bottlenecks and recommendations. `width` is that of the
        terminal, or 80 without one; a wider one shows more columns."""
        from sonde.render.terminal.profile_terminal import profile_text

        return profile_text(self, width=width if width is not None else shutil.get_terminal_size().columns)

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON. Rates are included for readers without Sonde, although they follow from the rest."""
        rates = {"samples_per_s": self.samples_per_s, "tokens_per_s": self.tokens_per_s, "flops_per_s": self.flops_per_s, "mfu": self.mfu}
        document: dict[str, Any] = strict({"format": FORMAT, "schema": SCHEMA, **asdict(self), "derived": rates})
        return document

    def save(self, path: str | Path, *, replace: bool = False, comparison: ProfileComparison | None = None) -> Path:
        """Writes `.json` (everything, for `load`), `.html` (a flame chart, with the `comparison` if there is one), `.json.gz` or
        `.trace.json` (a trace for Perfetto). Returns the path."""
        target = _path(path)
        write_new(target, _content(self, target, comparison), replace=replace)
        return target

    @staticmethod
    def load(path: str | Path) -> ProfileReport:
        """Reads a `.json` file that `save` wrote. Raises SondeError if it is none."""
        source = _path(path)
        try:
            document = json.loads(source.read_text(encoding="utf-8"))
        except OSError as error:
            raise SondeError(
                f"no profile can be read from {source}: {error.strerror or error}.\nMake one with: sonde profile script.py -o {source.name}"
            ) from None
        except ValueError as error:
            raise SondeError(f"{source} is not JSON, so it is not a profile of Sonde: {error}.") from None
        if not isinstance(document, dict):
            raise SondeError(f"{source} is not a profile of Sonde: it contains no JSON object.")
        return from_dict(document)

    def _per_s(self, num: int | None) -> float:
        return num / self.step.median_ms * 1e3 if num is not None and self.step.median_ms > 0 else math.nan


save, load = ProfileReport.save, ProfileReport.load


def from_dict(document: Mapping[str, Any]) -> ProfileReport:
    """The report of such a document. Raises SondeError if the document is not a profile."""
    if document.get("format") != FORMAT:
        raise SondeError(f'this JSON is not a profile of Sonde: its "format" is {document.get("format")!r}, not {FORMAT!r}.')
    if not isinstance(document.get("schema"), int) or document["schema"] > SCHEMA:
        raise SondeError(
            f"this profile is of format {document.get('schema')!r}; this version reads up to {SCHEMA}. Upgrade with: pip install -U sonde"
        )
    try:
        report: ProfileReport = _decode(ProfileReport, document)
        return report
    except (TypeError, ValueError, AttributeError) as error:
        raise SondeError(f"this profile is damaged and cannot be read: {error}.\nProfile again to make a new one.") from error


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _nearest(path: object, paths: Sequence[str]) -> str:
    if not paths:
        return "It has no layers: timers measure sections. Measure layers with profiler.profile(model, inputs)."
    near = difflib.get_close_matches(str(path), paths, n=3, cutoff=0.5)
    return f"Nearest: {', '.join(near)}" if near else f"There are: {listing(paths)}"


def check_suffix(path: Path) -> None:
    """Raises SondeError if no format has the suffix of this path."""
    if not path.name.lower().endswith(SUFFIXES):
        raise SondeError(f"{path} ends in none of {', '.join(SUFFIXES)}: the suffix selects the format.")


def _content(report: ProfileReport, target: Path, comparison: ProfileComparison | None) -> str | bytes:
    check_suffix(target)
    if target.name.lower().endswith(TRACE_SUFFIXES):
        from sonde.export.chrome_trace_format import compressed
        from sonde.export.profile_to_chrome_trace import trace_of_profile

        return compressed(trace_of_profile(report), target)
    if target.name.lower().endswith(".html"):
        from sonde.render.html.profile_html import profile_html

        return profile_html(report, comparison)
    return json.dumps(report.to_dict(), indent=1, allow_nan=False, ensure_ascii=True) + "\n"


def _decode(kind: Any, value: Any) -> Any:
    """A value of this type from JSON: dataclasses, named tuples, tuples, mappings, numbers and strings. Unknown fields are left out."""
    arguments = get_args(kind)
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: _decode(types[name], item) for name, item in value.items() if name in types})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(_decode(arguments[0], item) for item in value)
    if get_origin(kind) is Mapping:
        return {str(key): _decode(arguments[1], item) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, tuple):
        kinds = list(get_type_hints(kind).values())
        num_required = 4 if kind is TimeSpread else len(kinds)  # the file of an earlier version has fewer times: the rest is not known
        if not num_required <= len(value) <= len(kinds):
            raise ValueError(f"{len(value)} values where a {kind.__name__} has {len(kinds)}")
        return kind(*(_decode(each, item) for each, item in zip(kinds, value)))
    if arguments == (int, NoneType):
        return None if value is None else int(value)
    if arguments == (float, str):  # JSON has no NaN and no infinity: they are strings in the file
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
    return kind(value)


def _path(path: object) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise SondeError(f'a profile is a file, for instance "profile.json", not {path!r}.')
    return Path(path)
