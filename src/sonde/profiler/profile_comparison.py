"""Compares two profiles: which layers became slower or faster by more than the noise of both, in one sentence and row by row."""

import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sonde.formatting import listing, strict, whole_percent
from sonde.profiler.comparison_noise import CHANGED, MAX_SCATTER, Noise, estimate_noise, fastest
from sonde.profiler.profile_report import BACKWARD_REMAINDER, UNKNOWN, ProfileReport, TimeSpread
from sonde.profiler.recommendations import template
from sonde.render.profile_tree import enclosing_paths

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
        """Time after divided by time before, of the fastest steps of both; 2 means twice as slow."""
        return fastest(self.after) / fastest(self.before) if fastest(self.before) > 0 else math.nan

    @property
    def is_change(self) -> bool:
        return self.verdict not in ("unchanged", "could not tell")

    @property
    def change_ms(self) -> float:
        return fastest(self.after) - fastest(self.before)


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
    old_phases, new_phases = _phase_times(before), _phase_times(after)
    old_step, new_step = _step_time(before, old_phases), _step_time(after, new_phases)
    kinds = {layer.path: layer.kind for layer in after.layers}
    kinds |= {layer.path: layer.kind for layer in before.layers if layer.path not in kinds}
    old, new = _layer_times(before), _layer_times(after)
    containers = {parent for path in kinds for parent in enclosing_paths(path)}
    parts = [(old[path], new[path]) for path in kinds if path in old and path in new and path not in containers]
    names = [phase for phase in after.phases if phase in before.phases]
    parts += [(old_phases[name], new_phases[name]) for name in names if name not in ("forward", "backward")]
    noise = estimate_noise(parts, (old_step, new_step), is_disturbed=_is_disturbed(before) or _is_disturbed(after))
    layers = [_change(path, kind, old.get(path, UNKNOWN), new.get(path, UNKNOWN), noise) for path, kind in kinds.items()]
    # The rest of the step is frees of memory and a little Python: it varies more than layers do.
    for_other = noise._replace(ms=max(noise.ms, MAX_SCATTER * max(map(fastest, (old_step, new_step)))))
    phases = [
        _change(f"({name})", "phase", old_phases[name], new_phases[name], for_other if name == "other" else noise) for name in names
    ]
    step = _change("(step)", "", old_step, new_step, noise)
    sentence = _sentence(layers, phases, noise)
    return ProfileComparison(before, after, step, tuple(layers), tuple(phases), sentence, tuple(_notes(before, after)))


def _is_disturbed(report: ProfileReport) -> bool:
    return report.is_disturbed and report.environment.get("threads") != "1"


def _layer_times(report: ProfileReport) -> dict[str, TimeSpread]:
    """Forward and backward of each layer. The fastest time of a module is at most the sum of the fastest times inside it: on a busy machine
    each step may be disturbed somewhere, but hardly a layer is disturbed in every step."""
    inside: dict[str, float] = {}
    for layer in report.layers:
        own_ms = math.fsum(part.fastest_ms for part in (layer.forward_self, layer.backward_self) if part.is_known)
        for path in (layer.path, *enclosing_paths(layer.path)):
            inside[path] = inside.get(path, 0.0) + own_ms
    times = {}
    for layer in reversed(report.layers):
        whole = layer.latency if layer.latency.is_known else _sum((layer.forward, layer.backward))
        times[layer.path] = _at_most(whole, inside[layer.path])
    return times


def _phase_times(report: ProfileReport) -> dict[str, TimeSpread]:
    """The phases; the fastest forward and backward are at most the sum of the fastest times of the layers."""
    forward_ms, backward_ms = (
        math.fsum(part.fastest_ms for part in parts if part.is_known)
        for parts in ([layer.forward_self for layer in report.layers], [layer.backward_self for layer in report.layers])
    )
    beside_ms = math.fsum(ms for name, ms in report.remainder.items() if name in BACKWARD_REMAINDER)
    limits = {"forward": forward_ms, "backward": backward_ms + beside_ms}
    return {name: _at_most(spread, limits[name]) if name in limits else spread for name, spread in report.phases.items()}


def _step_time(report: ProfileReport, phases: Mapping[str, TimeSpread]) -> TimeSpread:
    """The step; its fastest time is at most the sum of those of its phases."""
    return _at_most(report.step, math.fsum(fastest(spread) for spread in phases.values())) if "other" in phases else report.step


def _at_most(spread: TimeSpread, parts_ms: float) -> TimeSpread:
    return spread._replace(fastest_ms=parts_ms) if 0 < parts_ms < spread.fastest_ms else spread


def _sum(spreads: Iterable[TimeSpread]) -> TimeSpread:
    """The sum of times. Quartiles are added as well, which makes them wider than those of the sum: verdicts become more cautious."""
    parts = [spread for spread in spreads if spread.is_known]
    if not parts:
        return UNKNOWN
    median, low, high, _, p95, p99, fast = (math.fsum(part[at] for part in parts) for at in range(len(TimeSpread._fields)))
    return TimeSpread(median, low, high, min(part.num for part in parts), p95, p99, fast)


def _join(group: Sequence[LayerChange]) -> LayerChange:
    if len(group) == 1:
        return group[0]
    path, kind = template(group[0].path), f"{group[0].kind} ×{len(group)}"
    return LayerChange(path, kind, _sum(one.before for one in group), _sum(one.after for one in group), group[0].verdict)


def _change(path: str, kind: str, before: TimeSpread, after: TimeSpread, noise: Noise) -> LayerChange:
    return LayerChange(path, kind, before, after, _verdict(before, after, noise))


def _verdict(before: TimeSpread, after: TimeSpread, noise: Noise) -> str:
    if not before.is_known or not after.is_known:
        return "new" if after.is_known else "gone" if before.is_known else "could not tell"
    if not all(math.isfinite(each) for each in (before.median_ms, after.median_ms)):
        return "could not tell"
    if max(abs(after.median_ms - before.median_ms), abs(fastest(after) - fastest(before))) < noise.ms:
        return "unchanged"
    if noise.separates(before, after):
        return "slower"
    if noise.separates(after, before):
        return "faster"
    low, high = sorted((before.median_ms, after.median_ms))
    return "unchanged" if high <= CHANGED * low else "could not tell"  # the medians differ, but both profiles vary as much


def _sentence(layers: Sequence[LayerChange], phases: Sequence[LayerChange], noise: Noise) -> str:
    if not layers and not phases:
        return "nothing to compare: one of the two profiles has no layers"
    named = list(_named(layers, noise))
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


def _named(layers: Sequence[LayerChange], noise: Noise) -> Iterator[tuple[tuple[LayerChange, ...], str]]:
    """The layers that explain the change: first equal layers of a stack together, then the remaining ones, one by one."""
    compared = [one for one in layers if one.before.is_known and one.after.is_known]
    containers = {parent for one in compared for parent in enclosing_paths(one.path)}
    stacks: dict[str, list[LayerChange]] = {}
    for one in compared:
        stacks.setdefault(_stack(one.path, containers), []).append(one)
    sums = {name: (_sum(one.before for one in members), _sum(one.after for one in members)) for name, members in stacks.items()}
    together = [_change(name, "", before, after, noise) for name, (before, after) in sums.items()]
    named: set[str] = set()
    for one in _responsible(together, noise):
        members = tuple(each for each in stacks[one.path] if each.verdict == one.verdict)
        alike = len(members) == len(stacks[one.path])
        for group, name in [(members, one.path)] if alike else [((each,), each.path) for each in members]:
            named.update(each.path for each in group)
            yield group, name
    for one in _responsible(compared, noise):
        if not any(path == one.path or path in enclosing_paths(one.path) or one.path in enclosing_paths(path) for path in named):
            yield (one,), one.path


def _stack(path: str, containers: Collection[str]) -> str:
    """The pattern of a path: `blocks.*.attention` for `blocks.3.attention`. Only numbers of modules with layers inside are replaced:
    `mlp.0` stays, because the layers of a Sequential differ."""
    parts = path.split(".")
    return ".".join("*" if part.isdigit() and ".".join(parts[: index + 1]) in containers else part for index, part in enumerate(parts))


def _responsible(layers: Sequence[LayerChange], noise: Noise) -> Iterator[LayerChange]:
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
        same = [part for part in parts if part.verdict == one.verdict]
        explained = math.fsum(part.change_ms for part in same)
        rest = sorted(fastest(whole) - math.fsum(map(fastest, inside)) for whole, inside in (
            (one.before, [part.before for part in same]), (one.after, [part.after for part in same])
        ))  # fmt: skip
        is_explained = abs(explained) >= EXPLAINED * abs(one.change_ms) or rest[1] <= max(noise.ratio * rest[0], rest[0] + noise.ms)
        # If several parts all changed by the same ratio as the module, the module is named.
        alike = len(parts) > 1 and all(part.ratio < ALIKE * one.ratio and one.ratio < ALIKE * part.ratio for part in parts)
        if same and is_explained and not alike:
            yield from parts
        else:
            yield one

    for root in roots:
        yield from explain(root)


def _phrase(group: Sequence[LayerChange], name: str) -> str:
    fast, slow = sorted((fastest(_sum(one.before for one in group)), fastest(_sum(one.after for one in group))))
    ratio = f"{slow / fast:.1f}x" if fast > 0 else "much"
    return f"{name or 'the model'} {ratio} {group[0].verdict}"


def _notes(before: ProfileReport, after: ProfileReport) -> Iterator[str]:
    for report, which in ((before, "before"), (after, "after")):
        if _is_disturbed(report):
            share = f"{whole_percent(report.disturbed_share)} of the steps {which}"
            yield f"other programs interrupted {share}: with several threads, only a layer that differs from the others can be named"
    if before.batch != after.batch:
        yield f"the batches differ: {before.batch or 'unknown'} before, {after.batch or 'unknown'} after"
    for name in dict.fromkeys((*before.environment, *after.environment)):
        old, new = before.environment.get(name, "unknown"), after.environment.get(name, "unknown")
        if old != new:
            yield f"{name} differs: {old} before, {new} after"
