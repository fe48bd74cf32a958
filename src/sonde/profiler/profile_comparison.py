"""Two profiles side by side: which layers became slower or faster by more than both of them vary, in one sentence and row by row."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sonde.profiler.profile_report import UNKNOWN, LayerCost, ProfileReport, Spread
from sonde.profiler.recommendations import template
from sonde.rules.words import listing

CHANGED = 1.2  # a factor: between two runs of the same program on a machine that does other things, medians differ by a few per cent
SMALLEST = 0.005  # share of the slower step: what takes less is not worth a sentence, whatever its factor
MOSTLY = 0.75  # of a module's change lies in one module inside: then that one is named
ALIKE = 1.15  # a factor between the changes of parts that changed together


class LayerChange(NamedTuple):
    """One layer, phase (in brackets) or part of the remainder (in brackets), before and after. Times include what is inside."""

    path: str
    kind: str
    before: Spread
    after: Spread
    verdict: str  # "slower", "faster", "unchanged", "new", "gone" or "could not tell"

    @property
    def ratio(self) -> float:
        """Time after over time before; 2 is twice as slow."""
        return self.after.median_ms / self.before.median_ms if self.before.median_ms > 0 else math.nan

    @property
    def change_ms(self) -> float:
        return self.after.median_ms - self.before.median_ms


@dataclass(frozen=True, slots=True)
class ProfileComparison:
    before: ProfileReport
    after: ProfileReport
    step: LayerChange
    layers: tuple[LayerChange, ...]  # in the order of the profile after; those that are gone come last
    phases: tuple[LayerChange, ...]
    sentence: str  # "layers.*.self_attn 1.8x slower, everything else unchanged"
    notes: tuple[str, ...]  # what makes the two hard to compare

    @property
    def changed(self) -> tuple[LayerChange, ...]:
        return tuple(one for one in self.layers if one.verdict not in ("unchanged", "could not tell"))

    @property
    def grouped(self) -> tuple[LayerChange, ...]:
        """The layers, those of a stack that have one class and one verdict as one: its times are their sums."""
        groups: dict[tuple[str, str, str], list[LayerChange]] = {}
        for one in self.layers:
            groups.setdefault((template(one.path), one.kind, one.verdict), []).append(one)
        return tuple(_joined(group) for group in groups.values())

    def summary(self, *, width: int = 80) -> str:
        """As text for a terminal."""
        from sonde.views.profile_text import comparison_text

        return comparison_text(self, width=width)

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, object]:
        """For programs: strict JSON."""
        from sonde.report import strict

        rows = [
            {"path": one.path, "kind": one.kind, "before_ms": one.before.median_ms, "after_ms": one.after.median_ms, "ratio": one.ratio,
             "verdict": one.verdict}
            for one in (self.step, *self.phases, *self.layers)
        ]  # fmt: skip
        document: dict[str, object] = strict({"sentence": self.sentence, "rows": rows, "notes": self.notes})
        return document


def compare(*, before: ProfileReport, after: ProfileReport) -> ProfileComparison:
    step = _change("(step)", "", before.step, after.step, math.nan)
    whole_ms = max((s.median_ms for s in (before.step, after.step) if s.is_known), default=math.nan)
    old = {layer.path: layer for layer in before.layers}
    new = {layer.path: layer for layer in after.layers}
    layers = [_layer_change(path, old.get(path), new.get(path), whole_ms) for path in (*new, *(p for p in old if p not in new))]
    names = [phase for phase in after.phases if phase in before.phases]
    phases = [_change(f"({name})", "phase", before.phases[name], after.phases[name], whole_ms) for name in names]
    sentence = _sentence(layers, phases, whole_ms)
    return ProfileComparison(before, after, step, tuple(layers), tuple(phases), sentence, tuple(_notes(before, after)))


def _layer_change(path: str, before: LayerCost | None, after: LayerCost | None, whole_ms: float) -> LayerChange:
    present = after or before
    assert present is not None
    return _change(path, present.kind, _both(before), _both(after), whole_ms)


def _both(layer: LayerCost | None) -> Spread:
    """Forward and backward together."""
    return _added((layer.forward, layer.backward)) if layer is not None else UNKNOWN


def _added(spreads: Iterable[Spread]) -> Spread:
    """Quartiles are added too, which makes them wider than those of the sum: a verdict needs more."""
    parts = [spread for spread in spreads if spread.is_known]
    if not parts:
        return UNKNOWN
    median, low, high = (math.fsum(part[at] for part in parts) for at in range(3))
    return Spread(median, low, high, min(part.num for part in parts))


def _joined(group: Sequence[LayerChange]) -> LayerChange:
    if len(group) == 1:
        return group[0]
    path, kind = template(group[0].path), f"{group[0].kind} ×{len(group)}"
    return LayerChange(path, kind, _added(one.before for one in group), _added(one.after for one in group), group[0].verdict)


def _change(path: str, kind: str, before: Spread, after: Spread, whole_ms: float) -> LayerChange:
    return LayerChange(path, kind, before, after, _verdict(before, after, whole_ms))


def _verdict(before: Spread, after: Spread, whole_ms: float) -> str:
    if not before.is_known or not after.is_known:
        return "new" if after.is_known else "gone" if before.is_known else "could not tell"
    if not all(math.isfinite(each) for each in (before.median_ms, after.median_ms)):
        return "could not tell"
    if abs(after.median_ms - before.median_ms) < SMALLEST * whole_ms:
        return "unchanged"
    if after.low_ms > before.high_ms and after.median_ms > CHANGED * before.median_ms:
        return "slower"
    if after.high_ms < before.low_ms and before.median_ms > CHANGED * after.median_ms:
        return "faster"
    low, high = sorted((before.median_ms, after.median_ms))
    return "unchanged" if high <= CHANGED * low else "could not tell"  # another median, but both waver by as much


# -- one sentence ---------------------------------------------------------------------------------


def _sentence(layers: Sequence[LayerChange], phases: Sequence[LayerChange], whole_ms: float) -> str:
    if not layers and not phases:
        return "nothing to compare: one of the two profiles has no layers"
    named = list(_named(layers, whole_ms))
    explained = ("(forward)", "(backward)") if named else ()  # by layers
    named += [((one,), one.path) for one in phases if one.path not in explained and one.verdict in ("slower", "faster")]
    named.sort(key=lambda group: -abs(math.fsum(one.change_ms for one in group[0])))
    parts = [_words(members, name) for members, name in named]
    if len(named) == 1 and not named[0][1]:
        parts = [parts[0].replace("the model", "everything", 1)]
    for verdict in ("new", "gone"):
        paths = [one.path for one in layers if one.verdict == verdict]
        outermost = [path for path in paths if not any(above in paths for above in _above(path))]
        if outermost:
            parts.append(f"{listing(outermost)} {verdict}")
    doubtful = any(one.verdict == "could not tell" and one.before.is_known and one.after.is_known for one in (*layers, *phases))
    if not parts:
        return "nothing changed beyond the noise" if doubtful else "everything unchanged"
    if parts[0].startswith("everything") and len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts)}, {'the rest within the noise' if doubtful else 'everything else unchanged'}"


def _named(layers: Sequence[LayerChange], whole_ms: float) -> Iterator[tuple[tuple[LayerChange, ...], str]]:
    """What explains the change: first the layers of a stack together, which are one thing to look at, then what is left, one by one."""
    compared = [one for one in layers if one.before.is_known and one.after.is_known]
    inside = {above for one in compared for above in _above(one.path)}
    stacks: dict[str, list[LayerChange]] = {}
    for one in compared:
        stacks.setdefault(_stack(one.path, inside), []).append(one)
    together = [
        _change(name, "", _added(one.before for one in members), _added(one.after for one in members), whole_ms)
        for name, members in stacks.items()
    ]
    told: set[str] = set()
    for one in _responsible(together):
        members = tuple(each for each in stacks[one.path] if each.verdict == one.verdict)
        alike = len(members) == len(stacks[one.path])
        for group, name in [(members, one.path)] if alike else [((each,), each.path) for each in members]:
            told.update(each.path for each in group)
            yield group, name
    for one in _responsible(compared):
        if not any(path == one.path or path in _above(one.path) or one.path in _above(path) for path in told):
            yield (one,), one.path


def _stack(path: str, inside: Collection[str]) -> str:
    """`blocks.3.attention` as `blocks.*.attention`. A number at the end stays, unless layers are in it: `mlp.0` is one of its kind."""
    parts = path.split(".")
    return ".".join("*" if part.isdigit() and ".".join(parts[: at + 1]) in inside else part for at, part in enumerate(parts))


def _responsible(layers: Sequence[LayerChange]) -> Iterator[LayerChange]:
    """The innermost layers that explain what changed."""
    paths = {one.path for one in layers}
    roots: list[LayerChange] = []
    inside: dict[str, list[LayerChange]] = {}
    for one in layers:
        above = next((path for path in _above(one.path) if path in paths), None)
        (roots if above is None else inside.setdefault(above, [])).append(one)

    def explain(one: LayerChange) -> Iterator[LayerChange]:
        parts = [part for each in inside.get(one.path, ()) for part in explain(each)]
        if one.verdict not in ("slower", "faster"):
            yield from parts  # one part slower, another faster: the whole is as before
            return
        explained = math.fsum(part.change_ms for part in parts if part.verdict == one.verdict)
        # Several parts that all changed by the factor of the whole: then the whole is what changed.
        alike = len(parts) > 1 and all(part.ratio < ALIKE * one.ratio and one.ratio < ALIKE * part.ratio for part in parts)
        if parts and abs(explained) >= MOSTLY * abs(one.change_ms) and not alike:
            yield from parts
        else:
            yield one

    for root in roots:
        yield from explain(root)


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _words(group: Sequence[LayerChange], name: str) -> str:
    before, after = (_added(spreads).median_ms for spreads in zip(*((one.before, one.after) for one in group)))
    slow, fast = max(before, after), min(before, after)
    factor = f"{slow / fast:.1f}x" if fast > 0 else "much"  # what took no time at all has no factor
    return f"{name or 'the model'} {factor} {group[0].verdict}"


def _notes(before: ProfileReport, after: ProfileReport) -> Iterator[str]:
    if before.batch != after.batch:
        yield f"the batches differ: {before.batch or 'unknown'} before, {after.batch or 'unknown'} after"
    for name in dict.fromkeys((*before.environment, *after.environment)):
        old, new = before.environment.get(name, "unknown"), after.environment.get(name, "unknown")
        if old != new:
            yield f"{name} differs: {old} before, {new} after"
