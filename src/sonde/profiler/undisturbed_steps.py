"""Steps in which another program took the processor away say more about that program: the least disturbed ones are used.

The system counts how often it took the processor from this process although that had work to do. On a quiet machine that is never, and all
steps are used; on a busy one a short step is either left alone or many times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sonde.profiler.step_recording import Recorded

ENOUGH = 5  # steps, for a spread: if so many were left alone, only such are used


def num_quiet(recorded: Recorded) -> int:
    """Steps of each kind that were left alone."""
    return min(recorded.bare_switches.count(0), recorded.timed_switches.count(0))


def least_disturbed(recorded: Recorded) -> Recorded:
    bare, timed = _quietest(recorded.bare_switches), _quietest(recorded.timed_switches)
    return replace(
        recorded,
        bare=[recorded.bare[place] for place in bare],
        timed=[recorded.timed[place] for place in timed],
        timed_ms=[recorded.timed_ms[place] for place in timed],
    )


def _quietest(switches: Sequence[int]) -> list[int]:
    wanted = min(len(switches), ENOUGH)
    limit = sorted(switches)[wanted - 1] if wanted else 0
    return [place for place, num in enumerate(switches) if num <= limit]
