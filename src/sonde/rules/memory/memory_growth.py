"""The memory of the process grows with every step, and nothing suggests that it will stop.

What it finds    outputs, features or batches that are stored and never removed; a cache without bounds; a list that a hook fills. Memory
                 above memory_threshold_mb or memory_threshold_share, where these are set.
Why it matters   the training swaps, and is killed at some point when no memory is left.
How it knows     after the first third of the steps, each quarter of the rest uses more memory at its lowest than the one before, at a rate
                 that does not fall; and tensors of all ages accumulate in one place, which is named. Without such a place (numpy, Python
                 objects) it is an info.
Known problems   optimizer state and caches that fill once grow in the first third only. deque(maxlen=…) and lru_cache(maxsize=…) are
                 bounded. A buffer that is bounded by hand looks like a leak until it is full. Growth below 24 MiB is not reported.
Fix              empty it after use, bound it, or store numbers instead of tensors.
"""

import numpy as np

from sonde.events import Finding, MemoryLimitFound, Severity, Started
from sonde.formatting import size
from sonde.memory_trend import MB, MIN_POINTS, MemoryThreshold, MemoryTrend
from sonde.rules._shared.leak_events import found_leaks
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

LEAST_MB = 24.0  # MiB: allocators take memory in pieces, and a loop that prints and logs grows by a few


def check(view: RunView) -> Result:
    over, growing = _above_threshold(view), _growth(view)
    return [*over, *growing] if over and isinstance(growing, list) else over or growing


def _above_threshold(view: RunView) -> list[Finding]:
    started, limit = next(iter(view.events(Started)), None), next(reversed(view.events(MemoryLimitFound)), None)
    if started is None:
        return []
    mb, share = started.memory_threshold_mb, started.memory_threshold_share
    threshold = MemoryThreshold.from_settings(mb, share, limit.num_bytes if limit is not None else None)
    resident_mb = view.steps["rss_mb"]
    if threshold is None or not (resident_mb * MB > threshold.num_bytes).any():
        return []
    row = int(np.argmax(resident_mb * MB > threshold.num_bytes))
    used, most = size(float(resident_mb[row]) * MB), size(float(np.nanmax(resident_mb)) * MB)
    step = view.step_number(row)
    cause = f"the process used {used} of memory at step {step}, more than {threshold.setting} allows ({size(threshold.num_bytes)})"
    fix = "use a smaller batch or fewer workers, or raise the threshold; `sonde memory` shows what fills the memory"
    evidence: dict[str, float | str] = {"threshold": size(threshold.num_bytes), "used": used, "most": most}
    return [Finding(RULE.name, Severity.WARNING, "", step, cause, fix, evidence)]


def _growth(view: RunView) -> Result:
    resident_mb = view.steps["rss_mb"]
    trend = MemoryTrend()
    is_measured = ~np.isnan(resident_mb)
    for step, value in zip(view.step_numbers[is_measured].tolist(), resident_mb[is_measured].tolist()):
        trend.update(step, value)
    if trend.num_points < MIN_POINTS:
        return NotEvaluated(f"memory was measured in fewer than {MIN_POINTS} steps")
    growth = trend.trend(LEAST_MB)
    if growth is None:
        return Clear()
    first, last, rate = size(growth.first * MB), size(growth.last * MB), f"{size(growth.per_step * MB)} per step"
    grew = f"memory grew from {first} to {last} between steps {growth.first_step} and {growth.last_step}, {rate}"
    evidence: dict[str, float | str] = {"per_step": rate, "first": first, "last": last}
    limit = next(reversed(view.events(MemoryLimitFound)), None)
    if limit is not None and limit.num_bytes:
        steps_left = (limit.num_bytes / MB - growth.last) / growth.per_step
        evidence |= {"full_after_steps": float(max(0, round(steps_left))), "limit": f"{size(limit.num_bytes)} of {limit.by}"}
    leak = next(iter(found_leaks(view)), None)
    if leak is None:
        cause = f"{grew}, and no place was found where tensors accumulate without a bound"
        fix = "search for a list or a cache of numpy arrays or Python objects that only grows, unless it is a buffer with a bound"
        return [Finding(RULE.name, Severity.INFO, "", growth.first_step, cause, fix, evidence)]
    evidence |= {"holder": leak.holder, "kept": size(leak.num_bytes)}
    return [Finding(RULE.name, Severity.WARNING, "", leak.step, f"{grew}: {leak.cause}", leak.fix, evidence)]


RULE = Rule("memory-growth", check, page=__doc__, needs=("rss_mb",), explains=("out-of-memory",))
