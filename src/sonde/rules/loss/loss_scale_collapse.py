"""The scale of a GradScaler falls and falls: step after step is skipped.

What it finds    gradients that are not finite whatever the scale: an operation that overflows in half precision by itself, a NaN that the
                 scaler hides by skipping, a training that diverges.
Why it matters   a skipped step trains nothing, and no message says so. Below a scale of 1 small gradients are lost to rounding.
How it knows     steps are skipped with a scale below 1; or many in a row while the gradients are not finite without a scale too; or the
                 scale fell to a thousandth of its settled value. The step is replayed: which operation made the Inf, and is the gradient
                 finite without the scale?
Known problems   the first skips and single later ones are how a scaler works. A scale on a device is read at the next observed step.
Fix              run the operation that is named in float32 (autocast(enabled=False)) or use bfloat16; or correct the operation.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sonde.events import Severity, UpdateSkipped
from sonde.formatting import number
from sonde.rules._shared.read_event_tables import text
from sonde.rules.column_helpers import Bools, first_where
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

FLOOR = 1.0  # a scale below it makes gradients smaller instead of larger: the PyTorch manual calls it a sign that something is wrong
NUM_BELOW = 3  # steps skipped below it: a scaler that was given a low scale may skip one
SETTLED = 20  # updates that were made: then the scaler has found its level
FELL = 1000.0  # times: ten halvings more than it has grown
HOPELESS = 8  # steps skipped in a row that no scale can save
STUCK = 10  # steps in a row, up to the last: nothing is learned any more


def check(view: RunView) -> Result:
    if not view.calls["backwards"]:
        return NotEvaluated("no backward was seen")
    rows = np.flatnonzero(np.isfinite(view.steps["loss_scale"]))  # the steps with a GradScaler
    scale, is_skipped = view.steps["loss_scale"][rows], view.counts("skipped_steps")[rows] > 0
    num_updates = np.cumsum(~is_skipped & (view.counts("optimizer_steps")[rows] > 0))
    settled = np.maximum.accumulate(np.where(~is_skipped & (num_updates >= SETTLED), scale, 0.0))
    in_a_row = _num_in_a_row(is_skipped)
    is_hopeless = (in_a_row >= HOPELESS) & _is_bad_without_scale(view)[rows]
    is_low = np.cumsum(is_skipped & (scale < FLOOR)) >= NUM_BELOW
    collapse = first_where(is_skipped & (is_low | is_hopeless | (settled >= FELL * scale)))
    if collapse is None:
        return Clear()
    events = view.events(UpdateSkipped)
    answered = next((event for event in reversed(events) if event.by), events[-1] if events else None)
    by, origin, where = (answered.by or "", answered.origin or {}, answered.where) if answered else ("", {}, "")
    num_skipped, lowest = int(is_skipped.sum()), float(scale[is_skipped].min())
    fell = f"the scale fell from {number(max(settled[-1], scale[0]))} to {number(lowest)}"
    first = f"; the gradient of {where} is the first that is not finite" if where else ""
    hopeless = ", with or without a scale, so no scale can help" if by == "number" else ""
    return RULE.finding(
        Severity.CRITICAL if in_a_row[-1] >= STUCK else Severity.ERROR,
        view.step_number(int(rows[collapse])),
        cause=f"a GradScaler skipped {num_skipped} of {len(rows)} steps and {fell}{_origin_text(origin) or first}{hopeless}",
        fix=_fix(by, origin),
        evidence={
            **source_evidence(text(origin, "source"), text(origin, "text")),
            "num_skipped": num_skipped,
            "num_scaled": len(rows),
            "skipped_in_a_row": int(in_a_row.max()),
            "first_scale": float(scale[0]),
            "lowest_scale": lowest,
            **({"operation": text(origin, "operation"), "key": text(origin, "key")} if origin else {}),
            **({"made_by": "the scale" if by == "scale" else "the numbers themselves"} if by else {}),
            **({"first_gradient": where} if where else {}),
            **({"note 1": answered.reason} if answered and answered.reason else {}),
        },
        where=text(origin, "module") or where,
    )


def _num_in_a_row(condition: Bools) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each entry, how many in a row up to it hold."""
    places = np.arange(1, len(condition) + 1)
    return places - np.maximum.accumulate(np.where(condition, 0, places))


def _is_bad_without_scale(view: RunView) -> Bools:
    """Steps from which on the last replay says that the gradient is not finite without the scale either."""
    is_bad = np.zeros(view.num_steps, bool)
    for row, event in view.events_with_rows(UpdateSkipped):
        if event.by:
            is_bad[row:] = event.by == "number"
    return is_bad


def _origin_text(origin: Mapping[str, Any]) -> str:
    if not origin:
        return ""
    backward = "the backward of " if origin.get("phase") == "backward" else ""
    at = f" at {text(origin, 'source')}" if text(origin, "source") else ""
    value = "NaN" if origin.get("kind") == "nan" else "Inf"
    return f"; {backward}{text(origin, 'operation')}{at} makes the {value}: {text(origin, 'cause')}"


def _fix(by: str, origin: Mapping[str, Any]) -> str:
    if by == "number" and text(origin, "fix") and origin.get("key") != "fp16-overflow":
        return text(origin, "fix")
    return (
        "keep the loss and its targets near 1 (normalize them, take a mean instead of a sum), run that part in float32 "
        "(torch.autocast(enabled=False)), or use bfloat16"
    )


RULE = Rule("loss-scale-collapse", check, page=__doc__, explains=("unchanged-parameter", "loss-plateau", "vanishing-gradient", "dead-relu"))
