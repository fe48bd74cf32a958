"""Finds the responsible samples of a batch by bisection.

`find_failing_samples` runs halves of the batch, and halves of those that fail, until single samples are left.

`find_heaviest_samples` leaves parts of the batch out and measures how much a number (the loss, the gradient norm) decreases; it splits the
heaviest part first. Leaving samples out changes the batch less than running them alone, so a batch norm still has a batch.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, log2
from time import perf_counter

MAX_S = 20.0  # seconds: the limit for large models

# ---- samples that fail

EXHAUSTIVE = 16  # samples: a batch up to this size is searched to single samples, even if every part of it fails
WIDESPREAD = 0.5  # share of the batch: if more samples than that fail by themselves, the data is not the cause


@dataclass(frozen=True, slots=True)
class FoundSamples:
    """The responsible samples of a batch."""

    samples: tuple[int, ...] | None  # (): only the whole batch is responsible; None: the samples are not the cause, or it is unknown
    note: str = ""
    shares: tuple[float, ...] = ()  # of the excess of a number, one per sample, the largest first


@dataclass(slots=True)
class _Trials:
    """Runs groups of samples, within a budget of trials and seconds."""

    fails: Callable[[Sequence[int]], bool]
    left: int  # trials
    until: float  # by perf_counter
    good: list[int] = field(default_factory=list)  # samples of groups that did not fail

    def run(self, group: Sequence[int]) -> bool:
        """Whether the group fails."""
        self.left -= 1
        if perf_counter() > self.until:
            self.left = 0
        try:
            failed = self.fails(group)
        except Exception:
            # The group may be too small for a batch norm: once more with good samples added.
            if not self.good or self.left <= 0:
                raise
            self.left -= 1
            failed = self.fails(sorted({*group, *self.good[:2]}))
        if not failed:
            self.good.extend(group[:2])
        return failed

    def run_with_good_samples(self, group: Sequence[int], *, exclude: Sequence[int]) -> bool:
        """Whether the group fails together with two good samples that are not in `exclude`: a kernel for one row may differ."""
        added = [sample for sample in self.good if sample not in exclude][:2]
        return bool(added) and self.left > 0 and self.run([*group, *added])


def _every_first_sample_fails(trials: _Trials, groups: Sequence[Sequence[int]]) -> bool:
    """Whether one sample of each group fails by itself: then the data is not the cause. True if single samples cannot run."""
    try:
        return all(trials.run(group[:1]) for group in groups)
    except Exception:
        return True


def find_failing_samples(num: int, fails: Callable[[Sequence[int]], bool]) -> FoundSamples:
    """Finds the samples that make a step fail.

    Args:
        num: size of the batch.
        fails: runs the step on some samples and returns whether it fails. It is called O(log num) times.
    """
    if num < 2:
        return FoundSamples(None)
    trials = _Trials(fails, left=6 * ceil(log2(num)) + 8, until=perf_counter() + MAX_S)
    groups: list[list[int]] = [list(range(num))]
    found: list[int] = []
    needs_several = False  # a group fails although neither half of it does
    is_scattered = False  # every part of the batch fails, but not every sample: search depth first, and find some of the samples
    try:
        while groups and trials.left > 1:
            group = groups.pop(0 if not is_scattered else min(range(len(groups)), key=lambda i: len(groups[i])))
            if len(group) == 1:
                found += group
                continue
            both = group[: len(group) // 2], group[len(group) // 2 :]
            halves = [half for half in both if trials.run(half)]
            halves = halves or [half for half in both if trials.run_with_good_samples(half, exclude=group)]
            needs_several = needs_several or not halves
            groups += halves
            if not is_scattered and len(groups) >= 4 and sum(map(len, groups)) == num > EXHAUSTIVE:
                is_scattered = not _every_first_sample_fails(trials, groups)
                if is_scattered:
                    continue
                return FoundSamples(None, "every part of the batch triggers it, so the samples are not to blame")
    except Exception as error:
        note = f"smaller parts of the batch could not be run ({type(error).__name__}: {error})"[:300]
        return FoundSamples(tuple(sorted(found)) or None, note)
    if groups:
        num_suspects = sum(map(len, groups)) + len(found)
        if num_suspects > WIDESPREAD * num and not is_scattered:
            return FoundSamples(None, "most of the batch triggers it, so the samples are not to blame")
        found += [sample for group in groups for sample in group if len(group) == 1]
        if needs_several and not found:
            return FoundSamples((), "no sample triggers it by itself: several together do")
        note = f"these are some of the samples that trigger it; {num_suspects} are suspected"
        return FoundSamples(tuple(sorted(found)) or None, note)
    if needs_several and not found:
        return FoundSamples((), "no part of the batch triggers it by itself")
    if len(found) == num:
        return FoundSamples(None, "every sample triggers it by itself, so the samples are not to blame")
    return FoundSamples(tuple(sorted(found)))


# ---- samples that make a number large

COMPLETE = 0.95  # share of the excess: samples that explain this much are all that there are
SPREAD = 0.5  # share of the excess: if the samples explain less, it is spread over the batch
NEGLIGIBLE = 0.02  # share of the excess: a sample that contributes less is one of many
MAX_SHARE_OF_BATCH = 0.5  # more samples than that are not an exception


def find_heaviest_samples(
    num: int, excess: float, decrease_without: Callable[[Sequence[int]], float], *, max_s: float = MAX_S
) -> FoundSamples:
    """Finds the samples that contribute most of the excess of a number over its usual value.

    Args:
        num: size of the batch.
        excess: how much the number exceeds its usual value.
        decrease_without: how much the number decreases if some samples are left out. It is called O(log num) times per sample found.
        max_s: seconds after which the search stops.
    """
    if num < 2 or not excess > 0:
        return FoundSamples(None)
    until = perf_counter() + max_s
    trials_left = 8 * ceil(log2(num)) + 16
    heap: list[tuple[float, list[int]]] = [(-excess, list(range(num)))]
    found: dict[int, float] = {}
    note = ""
    while heap and sum(found.values()) < COMPLETE * excess:
        negative, group = heapq.heappop(heap)
        weight = -negative
        if weight < NEGLIGIBLE * excess:
            break
        if len(group) == 1:
            found[group[0]] = weight
            continue
        if trials_left < 2:
            break  # a few samples would have been found by now
        if perf_counter() > until:
            note = "there was no time to search the whole batch"
            break
        trials_left -= 2
        halves = group[: len(group) // 2], group[len(group) // 2 :]
        try:
            weights = [decrease_without(half) for half in halves]
        except Exception as error:
            note = f"parts of the batch could not be left out ({type(error).__name__}: {error})"[:300]
            break
        if not all(map(isfinite, weights)) or max(weights) < NEGLIGIBLE * weight:
            note = "leaving out either half changes nothing: it takes samples from both"
            continue
        for half, part in zip(halves, weights):
            heapq.heappush(heap, (-part, half))
    covered = sum(found.values())
    if not found and note:
        return FoundSamples(None, note)
    if covered < SPREAD * excess or len(found) > max(1, MAX_SHARE_OF_BATCH * num):
        return FoundSamples((), note)
    heaviest = sorted(found, key=lambda sample: -found[sample])
    return FoundSamples(tuple(heaviest), note, tuple(found[sample] / excess for sample in heaviest))
