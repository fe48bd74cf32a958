"""Python reads numbers out of tensors in every step: .item(), .tolist(), .cpu(), print.

What it finds    lines of your code that read numbers out of tensors in every training step, and take a large part of it.
Why it matters   on a device each call waits until everything before it is computed. On the CPU a call per element is slow, as is printing.
How it knows     in profiled steps every such call from your code is counted and timed. If one line makes 16 or more in a step, the time of
                 that line counts; otherwise the time of the calls alone.
Known problems   one loss.item() per step is harmless on the CPU and not reported. On a device the time includes the computing that the call
                 waited for, so the gain is an upper bound. Calls inside of libraries do not count. Not with torch.compile.
Fix              keep the numbers in tensors, sum them there, and read them once in several steps.
"""

from collections.abc import Mapping
from typing import Any

from sonde.events import StepProfile
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

MANY = 16  # calls from one line in a step: then it is called for every element, and the loop around it goes too
SAVED = 0.8  # of the time is promised: the numbers are still read sometimes


def check(view: RunView) -> Result:
    times, profiles = view.times, step_profiles(view)
    if reason := reason_without_profiles(view, profiles):
        return NotEvaluated(reason)
    reads_by_step = [_reads_by_line(profile) for profile in profiles]
    shares = median_shares([{line: read["share"] for line, read in reads.items()} for reads in reads_by_step])
    share = sum(shares.values())
    gain = SAVED * share * times.training_share
    if not times.is_worth(gain):
        return Clear()
    line = max(shares, key=lambda each: shares[each])
    read = next(reads[line] for reads in reversed(reads_by_step) if line in reads)
    num_others = sum(other > 0 for other in shares.values()) - 1
    return RULE.finding(
        severity_of(gain),
        profiles[0].step,
        cause=f"{line} reads numbers out of tensors with {read['call']}, {number(read['num'])} times in every step"
        + (f", and {num_others} other line{'s do' if num_others > 1 else ' does'} so too" if num_others else "")
        + f"; that is {100 * share:.0f} % of the step",
        fix=with_gain(
            "print every hundredth step, and a number instead of a tensor"
            if read["call"] == "print"
            else "keep the numbers in tensors, add them up there, and read the result once in several steps",
            gain,
        ),
        evidence={
            "gain": gain,
            "share": share,
            "calls_per_step": read["num"],
            "call": read["call"],
            "source": line,
            "source_text": read["text"],
        },
    )


def _reads_by_line(profile: StepProfile) -> dict[str, dict[str, Any]]:
    """One entry per line, with all of its calls and their share of the step."""
    times_of_lines: dict[str, Mapping[str, Any]] = {text(line, "line"): line for line in profile.lines}
    reads: dict[str, dict[str, Any]] = {}
    for row in profile.waits:
        read = reads.setdefault(text(row, "line"), {"call": text(row, "call"), "text": text(row, "text"), "num": 0.0, "ms": 0.0})
        read["num"] += amount(row, "num")
        read["ms"] += amount(row, "ms")
    for line, read in reads.items():
        whole_line = times_of_lines.get(line, {})
        is_loop = read["num"] >= MANY and is_small(whole_line, profile)
        read["share"] = max(read["ms"], amount(whole_line, "ms") if is_loop else 0.0) / step_ms(profile)
    return reads


RULE = Rule("host-sync", check, page=__doc__)
