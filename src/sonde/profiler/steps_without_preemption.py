"""Selects the steps during which other programs interrupted this process least.

The operating system counts how often it took the processor away from this process although it had work to do. On an idle machine that never
happens and all steps are used; on a busy one a short step is either undisturbed or many times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sonde.profiler.record_steps import StepRecordings

ENOUGH = 5  # steps for a median and quartiles: if that many were undisturbed, only such steps are used


def num_undisturbed(recordings: StepRecordings) -> int:
    """The number of undisturbed steps, of the kind (bare or timed) that has fewer."""
    return min(recordings.bare_preemptions.count(0), recordings.timed_preemptions.count(0))


def least_disturbed(recordings: StepRecordings) -> StepRecordings:
    bare, timed = _least_preempted(recordings.bare_preemptions), _least_preempted(recordings.timed_preemptions)
    return replace(
        recordings,
        bare=[recordings.bare[index] for index in bare],
        timed=[recordings.timed[index] for index in timed],
        timed_ms=[recordings.timed_ms[index] for index in timed],
    )


def _least_preempted(preemptions: Sequence[int]) -> list[int]:
    num = min(len(preemptions), ENOUGH)
    limit = sorted(preemptions)[num - 1] if num else 0
    return [index for index, count in enumerate(preemptions) if count <= limit]
