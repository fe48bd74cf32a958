"""A Python loop does in many small steps what torch could do in one.

What it finds    lines of your own code that run many times in every training step, with little work each time: a loop over samples or
                 elements.
Why it matters   every torch call costs some microseconds before it computes anything, and Python itself is slower still.
How it knows     in profiled steps each line is timed and counted. A line counts if it runs 32 times or more in the step with less than 0.1
                 ms each; the share of a function is the time of all such lines. The gain is a part of it, since the work itself remains.
Known problems   loops over layers or micro-batches are short and not meant. Small models spend their time in torch's own Python code; steps
                 of a few milliseconds are reported in long runs only. A recurrence may need a built-in (nn.GRU, torch.cumsum) or
                 torch.compile. Not measured with torch.compile or under a debugger. A loop that mostly reads numbers is host-sync. In a
                 rollout (the model runs in the loop, and the program reads numbers out of its outputs, as for an environment) each pass
                 needs the one before: that is an info, with other advice.
Fix              write it as one operation on the whole tensor, or do it once before the training.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from sonde.events import Severity, StepProfile
from sonde.formatting import number
from sonde.rules._shared.profiled_steps import (
    is_small,
    median_shares,
    reason_without_profiles,
    severity_of,
    step_ms,
    step_profiles,
    with_gain,
)
from sonde.rules._shared.read_event_tables import amount, text
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

MANY = 32  # times in one step: loops over layers, heads and micro-batches are shorter
SAVED = 0.7  # of their time is promised: one call instead of 32 or more leaves less than a tenth of it
READS = 0.5  # share of a loop from which on it is about reading numbers, which host-sync reports


def check(view: RunView) -> Result:
    times, profiles = view.times, step_profiles(view)
    if reason := reason_without_profiles(view, profiles):
        return NotEvaluated(reason)
    shares = median_shares([_shares_of_loops(profile) for profile in profiles])
    function = max(shares, key=lambda each: shares[each], default="")
    share = shares.get(function, 0.0)
    gain = SAVED * share * times.training_share
    if not times.is_worth(gain):
        return Clear()
    line = _longest_line(function, profiles)
    source, num, us_each = text(line, "line"), amount(line, "num"), 1e3 * amount(line, "ms") / amount(line, "num")
    num_calls = _num_model_calls_of_rollout(view, profiles)
    in_rollout = f", between {number(num_calls)} calls of the model whose outputs the program reads" if num_calls else ""
    fix = with_gain(
        "write the loop as one operation on the whole tensor (or a built-in such as nn.GRU), or do before the training what "
        "does not change from step to step",
        gain,
    )
    if num_calls:
        fix = "if each pass needs the one before (a rollout), step several environments at once, so that one call of the model serves all"
    return RULE.finding(
        Severity.INFO if num_calls else severity_of(gain),
        profiles[0].step,
        cause=f"a loop in {text(line, 'function')} takes {100 * share:.0f} % of a step: {source} runs {number(num)} times in every "
        f"step, {number(us_each)} µs each time{in_rollout}",
        fix=fix,
        evidence={
            "gain": gain,
            "loop_share": share,
            "times_per_step": num,
            "us_each": us_each,
            **({"model_calls_per_step": num_calls} if num_calls else {}),
            "function": text(line, "function"),
            "source": source,
            "source_text": text(line, "text"),
        },
    )


def _num_model_calls_of_rollout(view: RunView, profiles: Sequence[StepProfile]) -> float:
    """How often the model runs in a step, if the program reads numbers about as often: its next input depends on them. Otherwise 0."""
    rows = np.searchsorted(view.step_numbers, [profile.step for profile in profiles])
    calls = (view.counts("forwards") + view.counts("eval_forwards"))[rows[rows < view.num_steps]]
    num_calls = float(np.median(calls)) if len(calls) else 0.0
    num_reads = median(max((amount(row, "num") for row in profile.waits), default=0.0) for profile in profiles)
    return num_calls if num_calls >= MANY and num_reads >= num_calls / 2 else 0.0


def _shares_of_loops(profile: StepProfile) -> dict[str, float]:
    """By function, the share of the step that its loops take."""
    loop_ms: dict[str, float] = {}
    reading_ms: dict[str, float] = {}
    reading_lines = {text(row, "line") for row in profile.waits}
    for line in _loop_lines(profile):
        function, ms = _function(line), amount(line, "ms")
        loop_ms[function] = loop_ms.get(function, 0.0) + ms
        reading_ms[function] = reading_ms.get(function, 0.0) + (ms if text(line, "line") in reading_lines else 0.0)
    return {function: ms / step_ms(profile) for function, ms in loop_ms.items() if reading_ms[function] < READS * ms}


def _loop_lines(profile: StepProfile) -> list[Mapping[str, Any]]:
    return [line for line in profile.lines if amount(line, "num") >= MANY and is_small(line, profile)]


def _function(line: Mapping[str, Any]) -> str:
    """`train.py:main`: functions of several files may have the same name."""
    return f"{text(line, 'line').rpartition(':')[0]}:{text(line, 'function')}"


def _longest_line(function: str, profiles: Sequence[StepProfile]) -> Mapping[str, Any]:
    lines = [line for profile in profiles for line in _loop_lines(profile) if _function(line) == function]
    return max(lines, key=lambda line: amount(line, "ms"))


RULE = Rule("python-bound", check, page=__doc__, explains=("host-sync",))
