"""GradientReport: a verdict per layer (healthy, vanishing, exploding, dead, inactive) and trends, with the thresholds of the rules. A layer
is compared with the last layers of the same model and with its own weights, because the scale of the loss is arbitrary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from sonde.formatting import counted, listing, number, printable
from sonde.render.plots import Plot, layer_heatmap
from sonde.render.summaries.tables import html_table, text_table
from sonde.rules._shared.divergence_cause import GROWTH
from sonde.rules._shared.signal_growth_by_depth import SHALLOWEST
from sonde.rules.gradients.exploding_gradient import LEAP, NUM_LEAPS, USUAL
from sonde.rules.gradients.vanishing_gradient import FADED, PATIENCE
from sonde.tools.gradients import gradient_flow_analysis
from sonde.tools.gradients.gradient_flow_analysis import ClippingAdvice, GradientFrame, GradientHealth, LayerGradientInfo
from sonde.tools.gradients.gradient_noise_scale import NoiseScale
from sonde.tools.gradients.inactive_units import InactiveUnits

PER_WEIGHT = 100.0  # norm of a gradient over the norm of its weights: healthy layers are below 10
ENOUGH_BEFORE = 5  # earlier norms that show which norm is usual
INACTIVE_SHARE = 0.5  # of a layer's units; a few units of a ReLU layer are often inactive
TREND_POINTS = 8  # steps with a positive norm: fewer show no trend
TREND_DECADES = 0.5  # over the recorded steps, by a straight line through the logarithms: a factor of three
TREND_FIT = 0.5  # share of the variance that the line explains; below it there is no trend
SAME_SCALE = 1e-3  # difference of two exponents of two: gradients in half precision are rounded when they are unscaled
MAX_ROWS = 40  # of a printed table
MAX_UNITS = 20  # listed in one sentence
UNKNOWN = "could not tell"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Gradient norms of one layer over the recorded steps, with a verdict."""

    name: str
    steps: tuple[int, ...]  # steps in which the layer had a gradient
    norms: tuple[float, ...]  # L2, by step
    mean_abs: tuple[float, ...]
    trend: str  # "rising", "falling", "steady" or "could not tell"
    per_weight: float  # last norm over the norm of the layer's weights; NaN if these are not known
    verdict: str  # "healthy", "vanishing", "exploding", "dead" or "inactive" (at least half of its units are)
    why: str  # the evidence, in one sentence; empty for most healthy layers
    inactive_units: tuple[int, ...] = ()  # rows of the weight that had a gradient of exactly zero in all recent steps

    @property
    def last_norm(self) -> float:
        return self.norms[-1] if self.norms else math.nan

    def __str__(self) -> str:
        verdict = f"{self.verdict}: {self.why}" if self.why else self.verdict
        norms = "no norm"
        if self.norms:
            norms = f"norm {number(self.norms[0])} to {number(self.norms[-1])} in {counted(len(self.norms), 'step')}"
        return printable(f"{self.name}: {verdict} ({norms}, trend: {self.trend})")


@dataclass(frozen=True, slots=True)
class GradientReport:
    """Result of `GradientDebugger.analyze`. `overall_health` is None if nothing was recorded."""

    num_steps: int
    steps_counted_by: str  # what ends a step, as a sentence
    layers: Mapping[str, LayerReport]  # in order of depth
    overall_health: GradientHealth | None
    clipping: ClippingAdvice
    noise_scale: NoiseScale
    recommendations: tuple[str, ...]
    frames: tuple[GradientFrame, ...] = field(repr=False, default=())

    @property
    def steps_told_by(self) -> str:
        """The same as `steps_counted_by`, under the name of version 0.1."""
        return self.steps_counted_by

    def vanishing_layers(self) -> list[str]:
        """Layers with the verdict "vanishing"."""
        return self._with_verdict("vanishing")

    def exploding_layers(self) -> list[str]:
        """Layers with the verdict "exploding"."""
        return self._with_verdict("exploding")

    def nonfinite_layers(self) -> list[str]:
        """Layers with a NaN or Inf in the gradient of any step. Their verdict is "exploding"."""
        return [name for name, layer in self.layers.items() if not all(map(math.isfinite, layer.norms))]

    def dead_layers(self) -> list[str]:
        """Layers with a gradient of exactly zero, or without any gradient."""
        return self._with_verdict("dead")

    def inactive_units(self) -> dict[str, tuple[int, ...]]:
        """By layer: the units (rows of the weight) with a gradient of exactly zero in all recent steps, as behind a dead ReLU."""
        return {name: layer.inactive_units for name, layer in self.layers.items() if layer.inactive_units}

    def _with_verdict(self, verdict: str) -> list[str]:
        return [name for name, layer in self.layers.items() if layer.verdict == verdict]

    @property
    def total_norms(self) -> list[float]:
        """The norm of all gradients per step."""
        return [frame.total_norm for frame in self.frames]

    def plot(self, path: str | Path | None = None) -> Plot:
        """Norms of all layers over steps as a heat map; written to `path` if there is one (.png, .svg, .pdf, .html, .json)."""
        by_step = [{layer.name: layer.grad_norm for layer in frame.layers} for frame in self.frames]
        matrix = np.array([[column.get(name, 0.0) for column in by_step] for name in self.layers]).reshape(len(self.layers), len(by_step))
        steps = [frame.step for frame in self.frames]
        plot = layer_heatmap(list(self.layers), steps, matrix, name="gradient norms", label="L2 norm of the gradient")
        if path is not None:
            plot.save(path)
        return plot

    def summary(self) -> str:
        """The report as text: a table of layers, clipping advice, noise scale and recommendations."""
        if self.overall_health is None:
            return f"gradients: {UNKNOWN}. {self.recommendations[0]}"
        rows, left_out = self._rows()
        table = [self._headline(), "", text_table(_HEAD, rows), *left_out]
        return "\n".join([*table, "", *self._facts(), "", *(f"- {line}" for line in self.recommendations)])

    __str__ = summary

    def _repr_html_(self) -> str:
        rows, left_out = self._rows()
        return html_table(_HEAD, rows, title=self._headline(), notes=[*left_out, *self._facts(), *self.recommendations])

    def _headline(self) -> str:
        health = self.overall_health.value.replace("_", " ") if self.overall_health else UNKNOWN
        return f"gradients: {health}, {counted(len(self.layers), 'layer')} over {counted(self.num_steps, 'step')} ({self.steps_counted_by})"

    def _facts(self) -> list[str]:
        return [f"clipping     {self.clipping}", f"noise scale  {self.noise_scale}"]

    def _rows(self) -> tuple[list[list[object]], list[str]]:
        """Rows of the table and a note on omitted layers. If there are too many, healthy layers are omitted first."""
        layers = list(self.layers.values())
        worst = sorted(layers, key=lambda layer: layer.verdict == "healthy")[:MAX_ROWS]
        shown = [layer for layer in layers if layer in worst]
        rows: list[list[object]] = []
        for layer in shown:
            norms = [number(layer.norms[0]), number(layer.norms[-1])] if layer.norms else ["none", "none"]
            per_weight = number(layer.per_weight) if layer.per_weight == layer.per_weight else ""
            rows.append([layer.name, *norms, per_weight, layer.trend, f"{layer.verdict}: {layer.why}" if layer.why else layer.verdict])
        num_hidden, num_bad = len(layers) - len(shown), sum(layer.verdict != "healthy" for layer in layers if layer not in worst)
        return rows, [f"and {counted(num_hidden, 'more layer')}, {num_bad} of them not healthy"] if num_hidden else []


_HEAD = ("layer", "first norm", "last norm", "per weight", "trend", "verdict")


def build_gradient_report(
    frames: Sequence[GradientFrame], order: Sequence[str], scales: Mapping[str, float], *, vanishing_threshold: float,
    exploding_threshold: float, noise: NoiseScale, steps_counted_by: str, inactive: Mapping[str, InactiveUnits],
    applied: Mapping[int, float],
) -> GradientReport:  # fmt: skip
    """Builds the report. `order` lists the layers by depth; `scales` has the norms of their weights, if these are known; `applied` has, by
    step, the factor between the gradient that backward wrote and the one that the optimizer used (a loss scale, or clipping)."""
    if not frames:
        advice = ("No gradient was recorded: call register_hooks(model) before backward(), or record_gradient_flow(layer, gradient).",)
        return GradientReport(0, steps_counted_by, {}, None, gradient_flow_analysis.clipping_advice(()), noise, advice)
    thresholds = vanishing_threshold, exploding_threshold
    flags = [_flags(frame, order, scales, *thresholds, applied.get(frame.step, 1.0)) for frame in frames]
    usual_total = median([total for frame in frames if math.isfinite(total := frame.total_norm)] or [0.0])
    rows: dict[str, list[Row]] = {name: [] for name in order}
    for frame, row in zip(frames, flags):
        for layer in frame.layers:
            rows[layer.name].append((frame.step, layer, row.get(layer.name, _NO_ISSUE)))
    layers = {
        name: _layer_report(name, rows[name], len(frames), scales.get(name, math.nan), usual_total, inactive.get(name)) for name in order
    }
    verdicts = {name: layer.verdict for name, layer in layers.items()}
    judged = tuple(_with_verdicts(frame, row, verdicts) for frame, row in zip(frames, flags))
    nonfinite = [name for name in order if not all(map(math.isfinite, layers[name].norms))]
    by_verdict = {kind: [name for name in order if verdicts[name] == kind] for kind in ("vanishing", "exploding", "dead", "inactive")}
    vanishing, exploding, dead = by_verdict["vanishing"], by_verdict["exploding"], by_verdict["dead"]
    clipping = _clipping_advice(judged, applied)
    has_minor_issue = bool(vanishing or dead or by_verdict["inactive"]) or clipping.num_outliers >= NUM_LEAPS
    health = gradient_flow_analysis.classify_health(judged, exploded=bool(exploding), vanished=has_minor_issue)
    too_large = [name for name in exploding if name not in nonfinite]
    lines = gradient_flow_analysis.recommendations(vanishing, too_large, nonfinite, health, clipping)
    if unused := [name for name in dead if not layers[name].norms]:
        lines.insert(0, f"No gradient ever reached {listing(unused)}: the loss does not depend on them, or they are used under no_grad.")
    if zero := [name for name in dead if layers[name].norms]:
        lines.insert(0, f"Zero gradients in {listing(zero)}: check for dead ReLUs, a detached tensor or an unused output after them.")
    if inactive_layers := by_verdict["inactive"]:
        remedy = "lower the learning rate, start their biases at zero, or use a leaky activation"
        lines.insert(0, f"Most units of {listing(inactive_layers)} get no gradient and cannot learn, as behind dead ReLUs: {remedy}.")
    if len(too_large) > max(len(layers) / 2, 1):
        scaler = "" if applied else "; with a GradScaler, call register_hooks(model, optimizer), so that the unscaled gradients are judged"
        lines.insert(-1, f"Most layers are too large: if the loss is a sum over the batch, use the mean{scaler}.")
    if clipping.max_norm is not None and not too_large:
        spikes = f"Spikes: {gradient_flow_analysis.clipping_call(clipping.max_norm)} removes them; {clipping.reason}."
        lines = [spikes, *([] if health is GradientHealth.HEALTHY else lines)]
    return GradientReport(len(frames), steps_counted_by, layers, health, clipping, noise, tuple(lines), judged)


def _clipping_advice(frames: Sequence[GradientFrame], applied: Mapping[int, float]) -> ClippingAdvice:
    """The advice for gradients without the loss scale of a GradScaler, because clip_grad_norm_ is called after unscale_."""
    factors = unscaling_factors([frame.step for frame in frames], applied)
    if not factors:
        return gradient_flow_analysis.clipping_advice(frames)
    advice = gradient_flow_analysis.clipping_advice([_multiplied(frame, factor) for frame, factor in zip(frames, factors)])
    return replace(advice, reason=f"{advice.reason}; these are norms after scaler.unscale_(optimizer), which must come before clipping")


def _multiplied(frame: GradientFrame, factor: float) -> GradientFrame:
    return replace(frame, layers=tuple(replace(layer, grad_norm=layer.grad_norm * factor) for layer in frame.layers))


def unscaling_factors(steps: Sequence[int], applied: Mapping[int, float]) -> list[float]:
    """By step, the factor that a GradScaler multiplied the gradients by; empty if there is no loss scale. A loss scale is the same in most
    steps, or changes by a power of two; the factor of clipping differs from step to step."""
    exponents = {step: math.log2(share) for step, share in applied.items()}
    for scale in exponents.values():
        same = {step: exponent for step, exponent in exponents.items() if abs((exponent - scale + 0.5) % 1 - 0.5) < SAME_SCALE}
        if 2 * len(same) > len(exponents):
            break
    else:
        return []
    if max(map(abs, same.values())) < SAME_SCALE:  # a factor of one
        return []
    factors, known = [], next(iter(same.values()))
    for step in steps:
        known = same.get(step, known)
        factors.append(2.0**known)
    return factors


class LayerFlag(NamedTuple):
    """The issue of one layer in one step."""

    kind: str  # "zero", "vanishing", "exploding", "cancels" or "" (none)
    evidence: str  # the comparison behind it


_NO_ISSUE = LayerFlag("", "")
Row = tuple[int, LayerGradientInfo, LayerFlag]


def _flags(
    frame: GradientFrame, order: Sequence[str], scales: Mapping[str, float], low: float, high: float, applied: float
) -> dict[str, LayerFlag]:
    """The issues of one step by layer; layers without an issue are missing. Too large is what the optimizer used, after a GradScaler."""
    here = {layer.name: layer for layer in frame.layers}
    deep = [name for name in order if name in here and 0 < here[name].grad_norm < math.inf]
    last = deep[-max(1, len(deep) // 4) :] if len(deep) >= SHALLOWEST else []
    last_norm = max((here[name].grad_norm for name in last), default=math.nan)
    last_per_weight = max((here[name].grad_norm / scales[name] for name in last if scales.get(name, 0.0) > 0), default=math.nan)
    found: dict[str, LayerFlag] = {}
    for name, layer in here.items():
        norm, scale = layer.grad_norm, scales.get(name, 0.0)
        known = 0 < scale < math.inf
        # Comparisons with NaN are false, so a layer without a reference gets no flag.
        relative = norm / last_norm
        per_weight = norm / scale / last_per_weight if known and last_per_weight == last_per_weight else relative
        compared = f"{number(relative)} times that of the last layers"
        absolute = f"{number(norm / scale)} times its weights" if known else f"with a mean of {number(layer.mean_abs_grad)}"
        if not math.isfinite(norm):
            found[name] = LayerFlag("exploding", "not finite")
        elif norm == 0:
            found[name] = LayerFlag("zero", "exactly zero")
        elif min(relative, per_weight) >= GROWTH:
            found[name] = LayerFlag("exploding", compared)
        elif _is_too_large(norm * applied, scale if known else 0.0, high):
            found[name] = LayerFlag("exploding", absolute)
        elif max(relative, per_weight) <= FADED:
            found[name] = LayerFlag("vanishing", compared)
        elif norm < low * scale if known else layer.mean_abs_grad < low:
            found[name] = LayerFlag("vanishing", absolute)
    return {name: _unless_it_cancels(name, flag, found, here) for name, flag in found.items()}


def _is_too_large(norm: float, scale: float, high: float) -> bool:
    """By its weights if these are known; else by its norm alone."""
    return norm > high * scale > 0 or (norm > high and norm > PER_WEIGHT * scale)


def _unless_it_cancels(name: str, flag: LayerFlag, found: Mapping[str, LayerFlag], here: Mapping[str, LayerGradientInfo]) -> LayerFlag:
    """A bias recorded by itself may have no effect by construction (of attention keys, before a normalization): its gradient consists of
    rounding errors. If the gradient of its weight is not small, neither is the gradient that reaches the layer."""
    module, _, parameter = name.rpartition(".")
    weight = f"{module}.{parameter.replace('bias', 'weight')}" if module else parameter.replace("bias", "weight")
    if flag.kind not in ("zero", "vanishing") or weight == name or weight not in here or weight in found:
        return flag
    return LayerFlag("cancels", f"small, but {weight} gets a gradient: biases before a softmax or a normalization cancel out")


def _layer_report(
    name: str, rows: Sequence[Row], num_steps: int, scale: float, usual_total: float, inactive: InactiveUnits | None
) -> LayerReport:
    steps = tuple(step for step, _, _ in rows)
    norms = tuple(layer.grad_norm for _, layer, _ in rows)
    verdict, why = _verdict(rows, norms, num_steps, usual_total)
    if verdict == "healthy" and inactive is not None and inactive.share >= INACTIVE_SHARE:
        verdict, why = "inactive", _inactive_text(inactive)
    mean_abs = tuple(layer.mean_abs_grad for _, layer, _ in rows)
    per_weight = norms[-1] / scale if norms and scale > 0 else math.nan
    units = inactive.units if inactive is not None else ()
    return LayerReport(name, steps, norms, mean_abs, trend(steps, norms), per_weight, verdict, why, units)


def _inactive_text(found: InactiveUnits) -> str:
    units = listing([str(unit) for unit in found.units], MAX_UNITS)
    return f"{len(found.units):,} of {found.num_units:,} units had no gradient in the last {counted(found.num_steps, 'step')}: {units}"


def _verdict(rows: Sequence[Row], norms: Sequence[float], num_steps: int, usual_total: float) -> tuple[str, str]:
    """The verdict and its evidence. It must hold in the last `PATIENCE` steps (in all, if there are fewer): one step may be noise. Too
    large is also a norm that was too large in most steps, or that leaps again and again."""
    if not rows:
        return "dead", f"no gradient in {counted(num_steps, 'step')}"
    need = min(PATIENCE, len(rows))
    bad = [step for step, layer, _ in rows if not math.isfinite(layer.grad_norm)]
    if bad:
        return "exploding", f"not finite in {len(bad)} of {counted(len(rows), 'step')}, first in step {bad[0]}"
    ending = [flag.kind for _, _, flag in rows[-need:]]
    high = [(layer.grad_norm, flag.evidence) for _, layer, flag in rows if flag.kind == "exploding"]
    if len(high) > len(rows) / 2 or all(flag == "exploding" for flag in ending):
        norm, how = max(high)
        return "exploding", f"norm up to {number(norm)}, {how}, in {len(high)} of {counted(len(rows), 'step')}"
    leaps = _leaps(norms, usual_total)
    if len(leaps) >= NUM_LEAPS:
        steps = f"{len(leaps)} of {counted(len(rows), 'step')}"
        return "exploding", f"more than {LEAP:g} times its usual norm in {steps}, first in step {rows[leaps[0]][0]}"
    if all(flag == "zero" for flag in ending):
        return "dead", f"exactly zero in the last {counted(_last_streak(rows, 'zero'), 'step')}"
    if all(flag in ("vanishing", "zero") for flag in ending):
        num = _last_streak(rows, "vanishing", "zero")
        return "vanishing", f"norm {number(norms[-1])}, {rows[-1][2].evidence}, in the last {counted(num, 'step')}"
    return "healthy", rows[-1][2].evidence if all(flag == "cancels" for flag in ending) else ""


def _leaps(norms: Sequence[float], usual_total: float) -> list[int]:
    """Indices of norms far above those before them. A leap below the usual norm of the whole model changes no update much: it may be a
    layer of rounding errors, or one that is rarely used."""
    found = []
    for i in range(ENOUGH_BEFORE, len(norms)):
        usual = median(norms[max(i - USUAL, 0) : i])
        if usual > 0 and norms[i] > max(LEAP * usual, usual_total):
            found.append(i)
    return found


def _last_streak(rows: Sequence[Row], *kinds: str) -> int:
    return next((at for at, row in enumerate(reversed(rows)) if row[2].kind not in kinds), len(rows))


def _with_verdicts(frame: GradientFrame, flags: Mapping[str, LayerFlag], verdicts: Mapping[str, str]) -> GradientFrame:
    """The frame with flags corrected by the verdicts over all steps: a flag that the verdict does not confirm is no issue."""
    layers = []
    for layer in frame.layers:
        verdict, flag = verdicts[layer.name], flags.get(layer.name, _NO_ISSUE).kind
        vanishes = verdict in ("vanishing", "dead") and flag in ("vanishing", "zero")
        layers.append(replace(layer, is_exploding=verdict == flag == "exploding", is_vanishing=vanishes))
    return replace(frame, layers=tuple(layers))


def trend(steps: Sequence[int], norms: Sequence[float]) -> str:
    """The slope of a straight line through the logarithms of the norms: "rising", "falling", "steady" or "could not tell"."""
    points = [(step, math.log10(norm)) for step, norm in zip(steps, norms) if 0 < norm < math.inf]
    if len(points) < TREND_POINTS:
        return UNKNOWN
    x, y = np.array(points, np.float64).T
    x, y = x - x.mean(), y - y.mean()
    spread, scatter = float(x @ x), float(y @ y)
    slope = float(x @ y) / spread if spread else 0.0
    change = slope * float(x[-1] - x[0])
    if abs(change) < TREND_DECADES or slope * slope * spread < TREND_FIT * scatter:
        return "steady"
    return "rising" if change > 0 else "falling"
