"""Two profiles side by side: which layers became slower or faster by more than both of them vary, in one sentence and row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sonde.profiles.advice import template
from sonde.profiles.data import LayerCost, ProfileReport, Spread

if TYPE_CHECKING:
    from typing import Self

CHANGED = 1.15  # a factor: between two runs of the same program on a machine that does other things, medians differ by a few per cent
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
    sentence = _sentence(layers, phases)
    return ProfileComparison(before, after, step, tuple(layers), tuple(phases), sentence, tuple(_notes(before, after)))


def _layer_change(path: str, before: LayerCost | None, after: LayerCost | None, whole_ms: float) -> LayerChange:
    present = after or before
    assert present is not None
    return _change(path, present.kind, _both(before), _both(after), whole_ms)


def _both(layer: LayerCost | None) -> Spread:
    """Forward and backward together. Quartiles are added too, which makes them wider than those of the sum: a verdict needs more."""
    parts = [spread for spread in (layer.forward, layer.backward) if spread.is_known] if layer is not None else []
    if not parts:
        return Spread()
    return Spread(*(math.fsum(part[i] for part in parts) for i in range(3)), num=min(part.num for part in parts))


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
    return "unchanged"


# -- one sentence ---------------------------------------------------------------------------------


def _sentence(layers: Sequence[LayerChange], phases: Sequence[LayerChange]) -> str:
    tree = _Tree.of(layers)
    named = [one for root in tree.roots for one in tree.responsible(root)]
    named += [one for one in phases if one.path not in ("(forward)", "(backward)") and one.verdict in ("slower", "faster")]
    gone = [one for one in layers if one.verdict in ("new", "gone")]
    if not layers and not phases:
        return "nothing to compare: one of the two profiles has no layers"
    if not named and not gone:
        return "everything unchanged"
    parts = [_words(group) for group in _alike(named)]
    for verdict in ("new", "gone"):
        if any(one.verdict == verdict for one in gone):
            parts.append(f"{_names(tree.outermost(gone, verdict))} {verdict}")
    if len(named) == 1 and not named[0].path and not gone:
        return f"everything {parts[0].removeprefix('the model ')}"
    return f"{', '.join(parts)}, everything else unchanged"


class _Tree:
    """Layers by the nearest layer around them, to find the innermost one that explains a change."""

    def __init__(self, roots: list[LayerChange], inside: dict[str, list[LayerChange]]) -> None:
        self.roots, self.inside = roots, inside

    @classmethod
    def of(cls, layers: Sequence[LayerChange]) -> Self:
        paths = {one.path for one in layers}
        roots: list[LayerChange] = []
        inside: dict[str, list[LayerChange]] = {}
        for one in layers:
            above = next((path for path in _above(one.path) if path in paths), None)
            (roots if above is None else inside.setdefault(above, [])).append(one)
        return cls(roots, inside)

    def responsible(self, one: LayerChange) -> Iterator[LayerChange]:
        """The change itself, or the changes inside that make it up."""
        parts = [part for each in self.inside.get(one.path, ()) for part in self.responsible(each)]
        if one.verdict not in ("slower", "faster"):
            yield from parts  # one part slower, another faster: the whole is as before
            return
        explained = math.fsum(part.change_ms for part in parts if part.verdict == one.verdict)
        # Several parts that all changed by the factor of the whole: then the whole is what changed.
        together = len(parts) > 1 and all(part.ratio < ALIKE * one.ratio and one.ratio < ALIKE * part.ratio for part in parts)
        if parts and abs(explained) >= MOSTLY * abs(one.change_ms) and not together:
            yield from parts
        else:
            yield one

    def outermost(self, found: Sequence[LayerChange], verdict: str) -> list[str]:
        paths = {one.path for one in found if one.verdict == verdict}
        return [path for path in paths if not any(above in paths for above in _above(path))]


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _alike(named: Sequence[LayerChange]) -> list[list[LayerChange]]:
    groups: dict[tuple[str, str], list[LayerChange]] = {}
    for one in named:
        groups.setdefault((template(one.path), one.verdict), []).append(one)
    return sorted(groups.values(), key=lambda group: -abs(math.fsum(one.change_ms for one in group)))


def _words(group: Sequence[LayerChange]) -> str:
    before, after = (math.fsum(spread.median_ms for spread in side) for side in zip(*((one.before, one.after) for one in group)))
    slow, fast = max(before, after), min(before, after)
    factor = f"{slow / fast:.1f}x" if fast > 0 else "much"  # what took no time at all has no factor
    return f"{_names([one.path for one in group])} {factor} {group[0].verdict}"


def _names(paths: Sequence[str]) -> str:
    names = sorted({template(path) if len(paths) > 1 else path for path in paths})
    return ", ".join(name or "the model" for name in names)


def _notes(before: ProfileReport, after: ProfileReport) -> Iterator[str]:
    if before.batch != after.batch:
        yield f"the batches differ: {before.batch or 'unknown'} before, {after.batch or 'unknown'} after"
    for name in dict.fromkeys((*before.environment, *after.environment)):
        old, new = before.environment.get(name, "unknown"), after.environment.get(name, "unknown")
        if old != new:
            yield f"{name} differs: {old} before, {new} after"
