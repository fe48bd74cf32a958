"""Which samples of a batch are to blame: halves of the batch are tried, and halves of those that fail, until single samples are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

WIDESPREAD = 0.5  # of the batch: where more of it triggers the failure by itself, the samples are not what is wrong


@dataclass(slots=True)
class Culprits:
    samples: tuple[int, ...] | None  # (): it takes the whole batch; None: not the samples, or it cannot be told
    note: str = ""


@dataclass(slots=True)
class _Trial:
    fails: Callable[[Sequence[int]], bool]
    left: int  # trials
    good: list[int] = field(default_factory=list)

    def __call__(self, group: Sequence[int]) -> bool:
        self.left -= 1
        try:
            failed = self.fails(group)
        except Exception:
            # Too few for a batch norm, say: once more in good company.
            if not self.good or self.left <= 0:
                raise
            self.left -= 1
            failed = self.fails(sorted({*group, *self.good[:2]}))
        if not failed:
            self.good.extend(group[:2])
        return failed


def culprits(num: int, fails: Callable[[Sequence[int]], bool]) -> Culprits:
    """`fails` runs the step again on some of the samples. It is asked a few times more than the logarithm of the batch."""
    if num < 2:
        return Culprits(None)
    trial = _Trial(fails, left=6 * ceil(log2(num)) + 8)
    groups: list[list[int]] = [list(range(num))]
    found: list[int] = []
    together = False
    try:
        while groups and trial.left > 1:
            group = groups.pop(0)
            if len(group) == 1:
                found += group
                continue
            halves = [half for half in (group[: len(group) // 2], group[len(group) // 2 :]) if trial(half)]
            together = together or not halves
            groups += halves
            if len(groups) >= 4 and sum(map(len, groups)) == num:
                return Culprits(None, "every part of the batch triggers it, so the samples are not to blame")
    except Exception as error:
        note = f"smaller parts of the batch could not be run ({type(error).__name__}: {error})"[:300]
        return Culprits(tuple(sorted(found)) or None, note)
    if groups:
        suspects = sum(map(len, groups)) + len(found)
        if suspects > WIDESPREAD * num:
            return Culprits(None, "most of the batch triggers it, so the samples are not to blame")
        found += [sample for group in groups for sample in group if len(group) == 1]
        return Culprits(tuple(sorted(found)) or None, f"these are some of the samples that trigger it; {suspects} are suspected")
    if together and not found:
        return Culprits((), "no part of the batch triggers it by itself")
    return Culprits(tuple(sorted(found)))
