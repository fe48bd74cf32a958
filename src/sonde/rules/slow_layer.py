"""One layer takes many times as long as the work in it explains.

What it finds    a layer of torch.nn that is far slower than the other layers of the same model are for the same amount of work.
Why it matters   it holds up the whole step, and the reason is mostly a setting: float16 on a CPU that computes in float32 (measured: 25
                 times slower), numbers so small that the processor handles them one by one (subnormal: 100 times slower).
How it knows     in steps that were looked at closely, every layer was timed. Its work is the multiplications of its matrix product or
                 convolution, and the elements that it reads and writes. What the other layers take per multiplication, and 30 ns per
                 element (what dropout, the slowest of the common ones, takes on one core), say how long its forward should take, and
                 three times that its backward; five times as long and a quarter of the step is a finding. The best of all looks
                 counts, so that a busy machine makes none. The gain is what remains at the speed of the others.
Known problems   a depthwise convolution does little and moves much: its elements are counted. Layers of your own, recurrent layers and
                 attention are not judged, since what they compute is not known. Needs two other layers with real work to compare with.
Fix              depends on the reason: float32 instead of float16; torch.set_flush_denormal(True); another layout or another layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from sonde.events import Finding, Kind, Step
from sonde.rules.python_bound import XRAYS
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import Timing, Xrays, lines_of, severity, with_gain
from sonde.rules.words import amount, number, rows_of

RATIO = 5.0  # times the expected: layers of one model differ by two or three by their shape
BACKWARD = 3.0  # times its forward: the gradients of input and weights are two products of the same size; the rest is room
SHARE = 0.25  # of the step: less is not worth a look at one layer
ELEMENT_MS = 30e-6  # 30 ns, for layers that multiply nothing …
MOVED_MS = 2e-6  # … and for those that do: a depthwise convolution takes 1 ns
CALL_MS = 0.02  # what any call of a module takes before it computes
REAL_MS = 0.05  # a peer that takes less tells about calling, not about computing
PEERS = 2
SAVED = 0.7  # of the ideal is promised: conversions and the like remain
SUBNORMAL = -126  # exponent of the smallest normal float32
MANY = 0.05  # share of an output's numbers that are subnormal


@dataclass(slots=True)
class SlowLayer:
    name: ClassVar[str] = "slow-layer"
    explains: ClassVar[tuple[str, ...]] = ()

    timing: Timing = field(default_factory=Timing)
    xrays: Xrays = field(default_factory=Xrays)
    subnormal: dict[str, float] = field(default_factory=dict)  # layer -> share of its output, as last seen

    def see(self, step: Step) -> None:
        self.timing.see(step)
        self.xrays.see(step)
        frame = step.frames.get(Kind.ACTIVATION + Kind.EXPONENTS)
        if frame is None:
            return
        small: dict[str, float] = {}
        whole: dict[str, float] = {}
        for site, row in step.table(Kind.ACTIVATION + Kind.EXPONENTS):
            whole[site.name] = whole.get(site.name, 0.0) + row["count"]
            if row["exponent"] < SUBNORMAL:
                small[site.name] = small.get(site.name, 0.0) + row["count"]
        self.subnormal |= {name: small.get(name, 0.0) / num for name, num in whole.items() if num > 0}

    def answer(self) -> Answer:
        timing = self.timing
        if reason := timing.too_short():
            return NotEvaluated(reason)
        if len(self.xrays.regular) < XRAYS:
            return NotEvaluated(f"fewer than {XRAYS} steps were looked at closely")
        threads, cores = amount(self.xrays.machine, "threads"), amount(self.xrays.machine, "cores")
        if cores and threads > max(cores, 1):  # they wait for each other, now in this layer and now in that
            return NotEvaluated(f"torch computes with {number(threads)} threads on {number(cores)} cores, so no layer takes its own time")
        layers = self._layers()
        if len(layers) < PEERS + 1:
            return NotEvaluated("there are too few layers to compare with each other")
        slowest = max(layers, key=lambda path: layers[path]["share"])
        layer = layers[slowest]
        expected = _expected(slowest, layers)
        if expected is None:
            return NotEvaluated("there are too few layers to compare with each other")
        backward_known = layer["backward_ms"] > 0
        if backward_known:
            expected *= 1 + BACKWARD
        took = layer["forward_ms"] + layer["backward_ms"]
        ratio, share = took / expected, layer["share"]
        gain = SAVED * share * (1 - 1 / ratio) * timing.training_share if ratio > 0 else 0.0
        if ratio < RATIO or share < SHARE or not timing.worth(gain):
            return Clear()
        reason, fix = self._reason(slowest, layers)
        verb = "its forward and backward take" if backward_known else "its forward takes"
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where=slowest,
                step=self.xrays.first_step,
                cause=f"{verb} {number(took)} ms, {number(ratio)} times what the other layers would take for the same work; that is "
                f"{100 * share:.0f} % of the step{reason}",
                fix=with_gain(fix, gain),
                evidence={
                    "gain": gain, "share": share, "times_slower": ratio, "forward_ms": layer["forward_ms"],
                    "backward_ms": layer["backward_ms"] if backward_known else math.nan, "expected_ms": expected,
                    "type": str(layer["type"]), "dtype": str(layer["dtype"]),
                },
            )
        ]  # fmt: skip

    def _layers(self) -> dict[str, dict[str, Any]]:
        """What is known of each layer of torch.nn whose work is known: it at its best, and its usual share of the step."""
        seen: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
        for xray in self.xrays.regular:
            _, whole = lines_of(xray)
            for row in rows_of(xray, "layers"):
                if amount(row, "elements") > 0:
                    seen.setdefault(str(row.get("path")), []).append((row, whole))
        layers = {}
        for path, rows in seen.items():
            both = [(row, whole) for row, whole in rows if amount(row, "backward_ms") > 0]
            share = median((amount(row, "forward_ms") + amount(row, "backward_ms")) / (whole or 1.0) for row, whole in both or rows)
            layers[path] = {
                **rows[-1][0], "share": share, "forward_ms": min(amount(row, "forward_ms") for row, _ in rows),
                "backward_ms": min((amount(row, "backward_ms") for row, _ in both), default=0.0),
            }  # fmt: skip
        return layers

    def _reason(self, path: str, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
        dtype = str(layers[path]["dtype"])
        usual = _most_common([str(row["dtype"]) for other, row in layers.items() if other != path])
        if dtype != usual:
            return f"; it computes in {dtype}, the others in {usual}", f"compute it in {usual} like the other layers"
        source = max(self.subnormal, key=lambda name: self.subnormal[name], default="")
        if self.subnormal.get(source, 0.0) >= MANY:
            share = f"{100 * self.subnormal[source]:.0f} %"
            return f"; {share} of what {source} puts out is subnormal, below 1.2e-38", "call torch.set_flush_denormal(True) at the start"
        return "", "try another memory layout (channels_last), fewer groups, or another layer that does the same"


def _most_common(texts: list[str]) -> str:
    return max(set(texts), key=texts.count) if texts else ""


def _expected(path: str, layers: Mapping[str, Mapping[str, Any]]) -> float | None:
    """How long the forward of a layer should take, by what the others take."""
    peers = [row for other, row in layers.items() if other != path and amount(row, "forward_ms") >= REAL_MS]
    if len(peers) < PEERS:
        return None
    layer = layers[path]
    work, elements, calls = amount(layer, "multiplications"), amount(layer, "elements"), CALL_MS * amount(layer, "num")
    if not work:
        return ELEMENT_MS * elements + calls
    rate = _rate(peers)
    return None if rate is None else max(work * rate, MOVED_MS * elements) + calls


def _rate(peers: list[Mapping[str, Any]]) -> float | None:
    """Milliseconds per multiplication: half of the work of the peers is done faster, half slower."""
    works = [(amount(row, "forward_ms") / amount(row, "multiplications"), amount(row, "multiplications"))
             for row in peers if amount(row, "multiplications") > 0]  # fmt: skip
    left = sum(work for _, work in works) / 2
    for rate, work in sorted(works):
        left -= work
        if left <= 0:
            return rate
    return None
