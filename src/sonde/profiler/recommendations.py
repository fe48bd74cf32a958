"""Bottlenecks of a profile, and recommendations for a faster step. Nothing is measured here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from sonde.formatting import listing, number, whole_percent

if TYPE_CHECKING:
    from sonde.profiler.profile_report import LayerCost, ProfileReport

NOTABLE = 0.10  # share of the step: halving anything smaller would make no visible difference
MAX_BOTTLENECKS = 5  # in a longer list none stands out
DATA_WAIT = 0.15  # share of the step spent waiting for the next batch; loading in the background would hide it
HEAVY_OPTIMIZER = 0.20  # share of the step: an update usually costs much less than forward and backward
SLOW_ARITHMETIC = 0.25  # share of the measured peak: below it a layer is limited by memory or by Python, not by arithmetic
TINY_MS = 0.05  # a shorter call is mostly overhead: Python, dispatch, autograd
MANY_TINY = 0.30  # share of the step in such calls
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


class Bottleneck(NamedTuple):
    """A layer, a group of equal layers or a phase that takes a large share of the step."""

    where: str  # path of a layer, pattern of equal layers (`layers.*.linear1`), or the name of a phase in brackets
    kind: str  # class of the layer; "phase" for a phase
    ms: float  # in a step
    share: float  # of the step
    why: str  # one sentence with the measured numbers


def template(path: str) -> str:
    """The pattern of a path: `layers.*.linear1` for `layers.3.linear1`. Equal layers of a stack are optimized together."""
    return _NUMBERED.sub("*", path)


def bottlenecks(report: ProfileReport) -> tuple[Bottleneck, ...]:
    found = [Bottleneck(where, kind, ms, report.share(ms), _why(report, kind, layers, ms)) for where, kind, layers, ms in _groups(report)]
    for phase in ("data", "optimizer"):
        spread = report.phases.get(phase)
        if spread is not None and spread.median_ms > 0:
            share = report.phase_share(phase)
            found.append(Bottleneck(f"({phase})", "phase", spread.median_ms, share, f"{whole_percent(share)} of the step"))
    notable = [one for one in found if one.share >= NOTABLE]
    return tuple(sorted(notable, key=lambda one: -one.ms)[:MAX_BOTTLENECKS])


def _groups(report: ProfileReport) -> Iterator[tuple[str, str, list[LayerCost], float]]:
    groups: dict[tuple[str, str], list[LayerCost]] = {}
    for layer in report.layers:
        if layer.self_ms > 0:
            groups.setdefault((template(layer.path), layer.kind), []).append(layer)
    for (where, kind), layers in groups.items():
        name = where if any(char.isalpha() for char in where) else f"{layers[0].path} … {layers[-1].path}"
        if len(layers) == 1:
            name = layers[0].path or "(the model itself)"
        yield name, kind, layers, math.fsum(layer.self_ms for layer in layers)


def _why(report: ProfileReport, kind: str, layers: list[LayerCost], ms: float) -> str:
    whole = "the step" if report.step.is_known else "the recorded time"
    share = f"{kind} itself takes {whole_percent(report.share(ms))} of {whole}"
    if len(layers) > 1:
        share = f"{len(layers)} {kind} layers take {whole_percent(report.share(ms))} of {whole} themselves"
    speed = sum(layer.flops_self for layer in layers) / ms * 1e3
    if not speed:
        is_counted = any(layer.flops_self for layer in report.layers) and not any(layer.is_recorded for layer in layers)
        return f"{share}, without counted FLOPs: it is limited by memory" if is_counted else share  # else its limit is not known
    of_peak = f", {whole_percent(speed / report.peak_flops_per_s)} of this machine's peak" if report.peak_flops_per_s > 0 else ""
    return f"{share}, at {number(speed / 1e9)} GFLOP/s{of_peak}"


def recommendations(report: ProfileReport) -> Iterator[str]:
    data, optimizer = report.phases.get("data"), report.phases.get("optimizer")
    if data is not None and report.phase_share("data") >= DATA_WAIT:
        yield (
            f"{whole_percent(report.phase_share('data'))} of the step ({number(data.median_ms)} ms) is waiting for data: load it in the "
            "background (DataLoader(num_workers=…) or more workers, with persistent_workers=True), or do less work per sample."
        )
    if optimizer is not None and report.phase_share("optimizer") >= HEAVY_OPTIMIZER:
        yield (
            f"The optimizer takes {whole_percent(report.phase_share('optimizer'))} of the step ({number(optimizer.median_ms)} ms): "
            "try fused=True if it has that option, or a larger batch, which needs fewer updates for the same samples."
        )
    tiny = [layer for layer in report.layers if 0 < layer.call_ms < TINY_MS]
    tiny_ms = math.fsum(layer.self_ms for layer in tiny)
    if report.share(tiny_ms) >= MANY_TINY:
        yield (
            f"{whole_percent(report.share(tiny_ms))} of the step is in {len(tiny)} layers with calls shorter than {TINY_MS:g} ms: "
            "most of that is overhead of Python and torch. Try torch.compile(model), or a larger batch."
        )
    limit = SLOW_ARITHMETIC * report.peak_flops_per_s
    slow = [
        where for where, _, layers, ms in _groups(report)
        if report.share(ms) >= NOTABLE and 0 < sum(each.flops_self for each in layers) / ms * 1e3 < limit
    ]  # fmt: skip
    if slow and report.share(tiny_ms) < MANY_TINY:
        peak = f"{number(report.peak_flops_per_s / 1e9)} GFLOP/s"
        yield (
            f"{listing(slow)}: below {whole_percent(SLOW_ARITHMETIC)} of this machine's peak of {peak}. "
            "Larger batches, channels_last for convolutions, or bfloat16 if the machine supports it, may help."
        )
    if any(layer.flops_backward > 2.5 * layer.flops_forward > 0 and not layer.depth for layer in report.layers):
        yield "The backward computes more than twice the FLOPs of the forward: activation checkpointing trades time for memory."
