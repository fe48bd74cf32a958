"""Compares two profiles: which layers became slower or faster by more than both profiles vary, in one sentence and row by row."""

import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sonde.formatting import listing, strict
from sonde.profiler.profile_report import UNKNOWN, ProfileReport, TimeSpread
from sonde.profiler.recommendations import template
from sonde.render.profile_tree import enclosing_paths

CHANGED = 1.2  # ratio: on a machine with other load, medians of two runs of one program differ by a few percent
SMALLEST = 0.005  # share of the slower step: a smaller change is not reported, whatever its ratio
EXPLAINED = 0.75  # share of a module's change that the modules inside must explain to be named instead of it
ALIKE = 1.15  # between the ratios of modules that changed together


class LayerChange(NamedTuple):
    """A layer, or a phase (name in brackets), before and after. Times include the layers inside."""

    path: str
    kind: str
    before: TimeSpread
    after: TimeSpread
    verdict: str  # "slower", "faster", "unchanged", "new", "gone" or "could not tell"

    @property
    def ratio(self) -> float:
        """Time after divided by time before; 2 means twice as slow."""
        return self.after.median_ms / self.before.median_ms if self.before.median_ms > 0 else math.nan

    @property
    def is_change(self) -> bool:
        return self.verdict not in ("unchanged", "could not tell")

    @property
    def change_ms(self) -> float:
        return self.after.median_ms - self.before.median_ms


@dataclass(frozen=True, slots=True)
class ProfileComparison:
    """The differences between two profiles."""

    before: ProfileReport
    after: ProfileReport
    step: LayerChange
    layers: tuple[LayerChange, ...]  # in the order of `after`; layers that only `before` has come last
    phases: tuple[LayerChange, ...]
    sentence: str  # "layers.*.self_attn 1.8x slower, everything else unchanged"
    notes: tuple[str, ...]  # differences that limit the comparison

    @property
    def changed(self) -> tuple[LayerChange, ...]:
        return tuple(one for one in self.layers if one.is_change)

    @property
    def grouped(self) -> tuple[LayerChange, ...]:
        """The layers; layers of a stack with the same class and verdict are joined, with the sum of their times."""
        groups: dict[tuple[str, str, str], list[LayerChange]] = {}
        for one in self.layers:
            groups.setdefault((template(one.path), one.kind, one.verdict), []).append(one)
        return tuple(_join(group) for group in groups.values())

    def summary(self, *, width: int | None = None) -> str:
        """Text for a terminal of this width, by default of the width that it has (80 without one)."""
        from sonde.render.terminal.profile_terminal import comparison_text

        return comparison_text(self, width=width if width is not None else shutil.get_terminal_size().columns)

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, object]:
        """Strict JSON for programs."""
        rows = []
        for one in (self.step, *self.phases, *self.layers):
            times = {"before_ms": one.before.median_ms, "after_ms": one.after.median_ms, "ratio": one.ratio}
            rows.append({"path": one.path, "kind": one.kind, **times, "verdict": one.verdict})
        document: dict[str, object] = strict({"sentence": self.sentence, "rows": rows, "notes": self.notes})
        return document


def compare(*, before: ProfileReport, after: ProfileReport) -> ProfileComparison:
    """The comparison of two profiles of the same model or script."""
    step = _change("(step)", "", before.step, after.step, math.nan)
    step_ms = max((s.median_ms for s in (before.step, after.step) if s.is_known), default=math.nan)
    kinds = {layer.path: layer.kind for layer in after.layers}
    kinds |= {layer.path: layer.kind for layer in before.layers if layer.path not in kinds}
    old, new = ({layer.path: _sum((layer.forward, layer.backward)) for layer in report.layers} for report in (before, after))
    layers = [_change(path, kind, old.get(path, UNKNOWN), new.get(path, UNKNOWN), step_ms) for path, kind in kinds.items()]
    names = [phase for phase in after.phases if phase in before.phases]
    phases = [_change(f"({name})", "phase", before.phases[name], after.phases[name], step_ms) for name in names]
    sentence = _sentence(layers, phases, step_ms)
    return ProfileComparison(before, after, step, tuple(layers), tuple(phases), sentence, tuple(_notes(before, after)))


def _sum(spreads: Iterable[TimeSpread]) -> TimeSpread:
    """The sum of times. Quartiles are added as well, which makes them wider than those of the sum: verdicts become more cautious."""
    parts = [spread for spread in spreads if spread.is_known]
    if not parts:
        return UNKNOWN
    median, low, high = (math.fsum(part[at] for part in parts) for at in range(3))
    return TimeSpread(median, low, high, min(part.num for part in parts))


def _join(group: Sequence[LayerChange]) -> LayerChange:
    if len(group) == 1:
        return group[0]
    path, kind = template(group[0].path), f"{group[0].kind} ×{len(group)}"
    return LayerChange(path, kind, _sum(one.before for one in group), _sum(one.after for one in group), group[0].verdict)


def _change(path: str, kind: str, before: TimeSpread, after: TimeSpread, step_ms: float) -> LayerChange:
    return LayerChange(path, kind, before, after, _verdict(before, after, step_ms))


def _verdict(before: TimeSpread, after: TimeSpread, step_ms: float) -> str:
    if not before.is_known or not after.is_known:
        return "new" if after.is_known else "gone" if before.is_known else "could not tell"
    if not all(math.isfinite(each) for each in (before.median_ms, after.median_ms)):
        return "could not tell"
    if abs(after.median_ms - before.median_ms) < SMALLEST * step_ms:
        return "unchanged"
    if after.low_ms > before.high_ms and after.median_ms > CHANGED * before.median_ms:
        return "slower"
    if after.high_ms < before.low_ms and before.median_ms > CHANGED * after.median_ms:
        return "faster"
    low, high = sorted((before.median_ms, after.median_ms))
    return "unchanged" if high <= CHANGED * low else "could not tell"  # the medians differ, but both profiles vary as much


def _sentence(layers: Sequence[LayerChange], phases: Sequence[LayerChange], step_ms: float) -> str:
    if not layers and not phases:
        return "nothing to compare: one of the two profiles has no layers"
    named = list(_named(layers, step_ms))
    explained = ("(forward)", "(backward)") if named else ()  # by the named layers
    named += [((one,), one.path) for one in phases if one.path not in explained and one.verdict in ("slower", "faster")]
    named.sort(key=lambda group: -abs(math.fsum(one.change_ms for one in group[0])))
    parts = [_phrase(members, name) for members, name in named]
    if len(named) == 1 and not named[0][1]:
        parts = [parts[0].replace("the model", "everything", 1)]
    for verdict in ("new", "gone"):
        paths = [one.path for one in layers if one.verdict == verdict]
        outermost = [path for path in paths if not any(parent in paths for parent in enclosing_paths(path))]
        if outermost:
            parts.append(f"{listing(outermost)} {verdict}")
    is_uncertain = any(one.verdict == "could not tell" and one.before.is_known and one.after.is_known for one in (*layers, *phases))
    if not parts:
        return "nothing changed beyond the noise" if is_uncertain else "everything unchanged"
    if parts[0].startswith("everything") and len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts)}, {'the rest within the noise' if is_uncertain else 'everything else unchanged'}"


def _named(layers: Sequence[LayerChange], step_ms: float) -> Iterator[tuple[tuple[LayerChange, ...], str]]:
    """The layers that explain the change: first equal layers of a stack together, then the remaining ones, one by one."""
    compared = [one for one in layers if one.before.is_known and one.after.is_known]
    containers = {parent for one in compared for parent in enclosing_paths(one.path)}
    stacks: dict[str, list[LayerChange]] = {}
    for one in compared:
        stacks.setdefault(_stack(one.path, containers), []).append(one)
    sums = {name: (_sum(one.before for one in members), _sum(one.after for one in members)) for name, members in stacks.items()}
    together = [_change(name, "", before, after, step_ms) for name, (before, after) in sums.items()]
    named: set[str] = set()
    for one in _responsible(together):
        members = tuple(each for each in stacks[one.path] if each.verdict == one.verdict)
        alike = len(members) == len(stacks[one.path])
        for group, name in [(members, one.path)] if alike else [((each,), each.path) for each in members]:
            named.update(each.path for each in group)
            yield group, name
    for one in _responsible(compared):
        if not any(path == one.path or path in enclosing_paths(one.path) or one.path in enclosing_paths(path) for path in named):
            yield (one,), one.path


def _stack(path: str, containers: Collection[str]) -> str:
    """The pattern of a path: `blocks.*.attention` for `blocks.3.attention`. Only numbers of modules with layers inside are replaced:
    `mlp.0` stays, because the layers of a Sequential differ."""
    parts = path.split(".")
    return ".".join("*" if part.isdigit() and ".".join(parts[: index + 1]) in containers else part for index, part in enumerate(parts))


def _responsible(layers: Sequence[LayerChange]) -> Iterator[LayerChange]:
    """The innermost layers that explain what changed."""
    paths = {one.path for one in layers}
    roots: list[LayerChange] = []
    children: dict[str, list[LayerChange]] = {}
    for one in layers:
        parent = next((path for path in enclosing_paths(one.path) if path in paths), None)
        (roots if parent is None else children.setdefault(parent, [])).append(one)

    def explain(one: LayerChange) -> Iterator[LayerChange]:
        parts = [part for each in children.get(one.path, ()) for part in explain(each)]
        if one.verdict not in ("slower", "faster"):
            yield from parts  # one part may be slower and another faster while the module is unchanged
            return
        explained = math.fsum(part.change_ms for part in parts if part.verdict == one.verdict)
        # If several parts all changed by the same ratio as the module, the module is named.
        alike = len(parts) > 1 and all(part.ratio < ALIKE * one.ratio and one.ratio < ALIKE * part.ratio for part in parts)
        if parts and abs(explained) >= EXPLAINED * abs(one.change_ms) and not alike:
            yield from parts
        else:
            yield one

    for root in roots:
        yield from explain(root)


def _phrase(group: Sequence[LayerChange], name: str) -> str:
    fast, slow = sorted((_sum(one.before for one in group).median_ms, _sum(one.after for one in group).median_ms))
    ratio = f"{slow / fast:.1f}x" if fast > 0 else "much"
    return f"{name or 'the model'} {ratio} {group[0].verdict}"


def _notes(before: ProfileReport, after: ProfileReport) -> Iterator[str]:
    if before.batch != after.batch:
        yield f"the batches differ: {before.batch or 'unknown'} before, {after.batch or 'unknown'} after"
    for name in dict.fromkeys((*before.environment, *after.environment)):
        old, new = before.environment.get(name, "unknown"), after.environment.get(name, "unknown")
        if old != new:
            yield f"{name} differs: {old} before, {new} after"
