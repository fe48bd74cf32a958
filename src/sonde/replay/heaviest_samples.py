"""Which samples of a batch carry a number that is far too large: parts of the batch are left out, and what the number loses is their share.

The heaviest part is split first, until single samples make up most of it, or until it is clear that no few of them do. Leaving out, unlike
trying alone, keeps the batch nearly what it was: a batch norm still has a batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, log2
from time import perf_counter

MOST = 0.95  # of the excess: the samples that make up so much of it are all that there are
HALF = 0.5  # of the excess: where they make up less, it is spread over the batch
LEAST = 0.02  # of the excess: a sample that carries less is one of many
FEW = 0.5  # of the batch: more samples than that are not a few
MAX_S = 20.0  # seconds: a large model has been run often enough by then


@dataclass(frozen=True, slots=True)
class Carriers:
    samples: tuple[int, ...] | None  # the heaviest first; (): no few of them do; None: it cannot be told
    shares: tuple[float, ...] = ()  # of the excess, one per sample
    note: str = ""


def carriers(num: int, excess: float, weigh: Callable[[Sequence[int]], float], *, max_s: float = MAX_S) -> Carriers:
    """`weigh` answers how much the number loses without some of the samples. It is asked a few times more than the logarithm of the
    batch for each sample that is found."""
    if num < 2 or not excess > 0:
        return Carriers(None)
    until = perf_counter() + max_s
    left = 8 * ceil(log2(num)) + 16  # trials
    heap: list[tuple[float, list[int]]] = [(-excess, list(range(num)))]
    found: dict[int, float] = {}
    note = ""
    while heap and sum(found.values()) < MOST * excess:
        weight, group = heapq.heappop(heap)
        weight = -weight
        if weight < LEAST * excess:
            break
        if len(group) == 1:
            found[group[0]] = weight
            continue
        if left < 2:
            break  # a few would have been found by now
        if perf_counter() > until:
            note = "there was no time to look through the whole batch"
            break
        left -= 2
        halves = group[: len(group) // 2], group[len(group) // 2 :]
        try:
            weights = [weigh(half) for half in halves]
        except Exception as error:
            note = f"parts of the batch could not be left out ({type(error).__name__}: {error})"[:300]
            break
        if not all(map(isfinite, weights)) or max(weights) < LEAST * weight:
            note = "leaving out either half changes nothing: it takes samples from both"
            continue
        for half, part in zip(halves, weights):
            heapq.heappush(heap, (-part, half))
    covered = sum(found.values())
    if not found and note:
        return Carriers(None, note=note)
    if covered < HALF * excess or len(found) > max(1, FEW * num):
        return Carriers((), note=note)
    heaviest = sorted(found, key=lambda sample: -found[sample])
    return Carriers(tuple(heaviest), tuple(found[sample] / excess for sample in heaviest), note)
