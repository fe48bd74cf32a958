"""Which samples of a batch are to blame: halves of the batch are tried, and halves of those that fail, until single samples are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from time import perf_counter

EXHAUSTIVE = 16  # samples: so small a batch is tried sample by sample, even where every part of it fails
MAX_S = 20.0  # seconds: a large model has been run often enough by then
WIDESPREAD = 0.5  # of the batch: where more of it triggers the failure by itself, the samples are not what is wrong


@dataclass(slots=True)
class Culprits:
    samples: tuple[int, ...] | None  # (): it takes the whole batch; None: not the samples, or it cannot be told
    note: str = ""


@dataclass(slots=True)
class _Trial:
    fails: Callable[[Sequence[int]], bool]
    left: int  # trials
    until: float  # when to stop, by perf_counter
    good: list[int] = field(default_factory=list)

    def __call__(self, group: Sequence[int]) -> bool:
        self.left -= 1
        if perf_counter() > self.until:
            self.left = 0
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

    def in_company(self, group: Sequence[int], but: Sequence[int]) -> bool:
        """With two samples that are known to be good, and are none of `but`: one alone may be computed in another way than one of many."""
        company = [sample for sample in self.good if sample not in but][:2]
        return bool(company) and self.left > 0 and self([*group, *company])


def _all_alone(trial: _Trial, groups: Sequence[Sequence[int]]) -> bool:
    """Does one sample of each group do it alone? Then it is no matter of samples. Where one alone cannot be run, it is believed."""
    try:
        return all(trial(group[:1]) for group in groups)
    except Exception:
        return True


def culprits(num: int, fails: Callable[[Sequence[int]], bool]) -> Culprits:
    """`fails` runs the step again on some of the samples. It is asked a few times more than the logarithm of the batch."""
    if num < 2:
        return Culprits(None)
    trial = _Trial(fails, left=6 * ceil(log2(num)) + 8, until=perf_counter() + MAX_S)
    groups: list[list[int]] = [list(range(num))]
    found: list[int] = []
    together = False
    scattered = False  # every part of the batch fails, but not every sample: then some are found first, and not all of them
    try:
        while groups and trial.left > 1:
            group = groups.pop(0 if not scattered else min(range(len(groups)), key=lambda i: len(groups[i])))
            if len(group) == 1:
                found += group
                continue
            both = group[: len(group) // 2], group[len(group) // 2 :]
            halves = [half for half in both if trial(half)] or [half for half in both if trial.in_company(half, group)]
            together = together or not halves
            groups += halves
            if not scattered and len(groups) >= 4 and sum(map(len, groups)) == num > EXHAUSTIVE:
                scattered = not _all_alone(trial, groups)
                if scattered:
                    continue
                return Culprits(None, "every part of the batch triggers it, so the samples are not to blame")
    except Exception as error:
        note = f"smaller parts of the batch could not be run ({type(error).__name__}: {error})"[:300]
        return Culprits(tuple(sorted(found)) or None, note)
    if groups:
        suspects = sum(map(len, groups)) + len(found)
        if suspects > WIDESPREAD * num and not scattered:
            return Culprits(None, "most of the batch triggers it, so the samples are not to blame")
        found += [sample for group in groups for sample in group if len(group) == 1]
        if together and not found:
            return Culprits((), "no sample triggers it by itself: it takes several")
        return Culprits(tuple(sorted(found)) or None, f"these are some of the samples that trigger it; {suspects} are suspected")
    if together and not found:
        return Culprits((), "no part of the batch triggers it by itself")
    if len(found) == num:
        return Culprits(None, "every sample triggers it by itself, so the samples are not to blame")
    return Culprits(tuple(sorted(found)))
