"""One layer takes many times as long as the work in it explains.

What it finds    a layer of torch.nn that is much slower than the other layers of the same model are for the same amount of work.
Why it matters   it slows down the whole step, and the reason is mostly a setting: float16 on a CPU that computes in float32 (measured: 25
                 times slower), numbers so small that the processor handles them one by one (subnormal: 100 times slower).
How it knows     in profiled steps every layer is timed (the shortest time counts). Its work is its multiplications and the elements that it
                 reads and writes. The time of the other layers per multiplication, 30 ns per element, and three times that for backward,
                 give the time that it should take; five times as long and a quarter of the step is a finding.
Known problems   a depthwise convolution moves much: its elements are counted. Layers of your own, recurrent layers and attention are not
                 judged. Two other layers with real work are needed to compare with.
Fix              depends on the reason: float32 instead of float16; torch.set_flush_denormal(True); another layout or another layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from sonde.events import Kind, StepProfile
from sonde.formatting import number
from sonde.rules._shared.profiled_steps import (
    last_machine,
    reason_without_profiles,
    severity_of,
    step_ms,
    step_profiles,
    too_many_threads,
    with_gain,
)
from sonde.rules._shared.read_event_tables import amount, text
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Block, Reduction, RunView

RATIO = 5.0  # times the expected: layers of one model differ by two or three by their shape
BACKWARD = 3.0  # times its forward: the gradients of input and weights are two products of the same size; the rest is margin
SHARE = 0.25  # of the step: less is not worth attention to one layer
ELEMENT_MS = 30e-6  # 30 ns, for layers that multiply nothing …
MOVED_MS = 2e-6  # … and for those that do: a depthwise convolution takes 1 ns
CALL_MS = 0.02  # what any call of a module takes before it computes
REAL_MS = 0.05  # a layer that takes less measures the call, not the computing
PEERS = 2
SAVED = 0.7  # of the ideal is promised: conversions and the like remain
SMALLEST_NORMAL = -126  # exponent of the smallest normal float32
MANY = 0.05  # share of an output's numbers that are subnormal

EXPONENTS = Kind.ACTIVATION + Kind.EXPONENTS


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A layer of torch.nn whose work is known, over the profiled steps."""

    type: str
    dtype: str
    num_calls: float
    multiplications: float
    elements: float  # read and written
    forward_ms: float  # shortest
    backward_ms: float  # shortest; 0 if it is not known
    share: float  # of the step, median

    @classmethod
    def of(cls, rows: Sequence[tuple[Mapping[str, Any], float]]) -> LayerShare:
        """`rows`: of each profiled step its row, and what the whole step took in ms."""
        with_backward = [(row, whole_ms) for row, whole_ms in rows if amount(row, "backward_ms") > 0]
        last = rows[-1][0]
        return cls(
            type=text(last, "type"),
            dtype=text(last, "dtype"),
            num_calls=amount(last, "num"),
            multiplications=amount(last, "multiplications"),
            elements=amount(last, "elements"),
            forward_ms=min(amount(row, "forward_ms") for row, _ in rows),
            backward_ms=min((amount(row, "backward_ms") for row, _ in with_backward), default=0.0),
            share=median((amount(row, "forward_ms") + amount(row, "backward_ms")) / whole_ms for row, whole_ms in with_backward or rows),
        )


def check(view: RunView) -> Result:
    times, profiles = view.times, step_profiles(view)
    if reason := reason_without_profiles(view, profiles):
        return NotEvaluated(reason)
    machine = last_machine(profiles)
    if too_many_threads(machine):  # they wait for each other, sometimes in one layer and sometimes in another
        threads, cores = amount(machine, "threads"), amount(machine, "cores")
        return NotEvaluated(f"torch computes with {number(threads)} threads on {number(cores)} cores, so the times of layers are distorted")
    layers = _layers(profiles)
    path = max(layers, key=lambda each: layers[each].share, default="")
    expected_ms = _expected_forward_ms(path, layers) if len(layers) > PEERS else None
    if expected_ms is None:
        return NotEvaluated("there are too few layers to compare with each other")
    layer = layers[path]
    knows_backward = layer.backward_ms > 0
    if knows_backward:
        expected_ms *= 1 + BACKWARD
    took_ms = layer.forward_ms + layer.backward_ms
    ratio = took_ms / expected_ms
    gain = SAVED * layer.share * (1 - 1 / ratio) * times.training_share if ratio > 0 else 0.0
    if ratio < RATIO or layer.share < SHARE or not times.is_worth(gain):
        return Clear()
    why, fix = _reason(path, layers, view)
    return RULE.finding(
        severity_of(gain),
        profiles[0].step,
        cause=f"its forward {'and backward take' if knows_backward else 'takes'} {number(took_ms)} ms, {number(ratio)} times what the "
        f"other layers would take for the same work; that is {100 * layer.share:.0f} % of the step{why}",
        fix=with_gain(fix, gain),
        evidence={
            "gain": gain,
            "share": layer.share,
            "times_slower": ratio,
            "forward_ms": layer.forward_ms,
            "backward_ms": layer.backward_ms if knows_backward else math.nan,
            "expected_ms": expected_ms,
            "type": layer.type,
            "dtype": layer.dtype,
        },
        where=path,
    )


def _layers(profiles: Sequence[StepProfile]) -> dict[str, LayerShare]:
    rows: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
    for profile in profiles:
        for row in profile.layers:
            if amount(row, "elements") > 0:
                rows.setdefault(text(row, "path"), []).append((row, step_ms(profile)))
    return {path: LayerShare.of(of_layer) for path, of_layer in rows.items()}


def _expected_forward_ms(path: str, layers: Mapping[str, LayerShare]) -> float | None:
    """How long the forward of a layer should take, by what the others take; None if there are too few others."""
    peers = [layer for other, layer in layers.items() if other != path and layer.forward_ms >= REAL_MS]
    if len(peers) < PEERS:
        return None
    layer = layers[path]
    calls_ms = CALL_MS * layer.num_calls
    if not layer.multiplications:
        return ELEMENT_MS * layer.elements + calls_ms
    ms_per_multiplication = _weighted_median(
        [(peer.forward_ms / peer.multiplications, peer.multiplications) for peer in peers if peer.multiplications > 0]
    )
    if ms_per_multiplication is None:
        return None
    return max(layer.multiplications * ms_per_multiplication, MOVED_MS * layer.elements) + calls_ms


def _weighted_median(values_and_weights: Sequence[tuple[float, float]]) -> float | None:
    """Half of the weight is below it, half above."""
    left = sum(weight for _, weight in values_and_weights) / 2
    for value, weight in sorted(values_and_weights):
        left -= weight
        if left <= 0:
            return value
    return None


def _reason(path: str, layers: Mapping[str, LayerShare], view: RunView) -> tuple[str, str]:
    """The end of the sentence, and what to do."""
    dtype = layers[path].dtype
    usual = Counter(layer.dtype for other, layer in layers.items() if other != path).most_common(1)[0][0]
    if dtype != usual:
        return f"; it computes in {dtype}, the others in {usual}", f"compute it in {usual} like the other layers"
    subnormal = view.reduced(SUBNORMAL_SHARES)
    source = max(subnormal, key=lambda name: subnormal[name], default="")
    if subnormal.get(source, 0.0) >= MANY:
        return (
            f"; {100 * subnormal[source]:.0f} % of the output of {view.layer_name(source)} is subnormal, below 1.2e-38",
            "call torch.set_flush_denormal(True) at the start",
        )
    return "", "try another memory layout (channels_last), fewer groups, or another layer that does the same"


def _update_subnormal_shares(block: Block, shares: dict[str, float]) -> dict[str, float]:
    """By layer, the share of its last measured output that is subnormal. A block has one row per layer and exponent."""
    table = block[EXPONENTS]
    names = [site.name if site else "" for site in table.sites]
    known, layer_of_row = np.unique(names, return_inverse=True)
    counts, is_subnormal = table["count"], table["exponent"] < SMALLEST_NORMAL
    for step in range(len(block)):
        num = np.bincount(layer_of_row, counts[step])
        num_subnormal = np.bincount(layer_of_row, counts[step] * is_subnormal[step])
        shares |= {str(name): float(small / all_) for name, small, all_ in zip(known, num_subnormal, num) if name and all_ > 0}
    return shares


# Not among the reductions of the rule: it is read only to explain a slow layer, and the layout of these frames changes with every step.
SUBNORMAL_SHARES: Reduction[dict[str, float]] = Reduction(kinds=(EXPONENTS,), initial=dict, reduce=_update_subnormal_shares)

RULE = Rule("slow-layer", check, page=__doc__)
