"""What a run does not show although the training had it: the loss, statistics of parameters and gradients, records that were lost.

A rule that finds nothing in such facts has not been evaluated, and a run that lacks them is not called healthy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from sonde.events import Kind, NotMeasured, ProbeDisabled
from sonde.formatting import counted, listing

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

LOSS = "loss"
RECORDS = "records"  # every rule rests on them

MIN_SHARE = 0.5  # of the steps with a backward that have a loss: below, the loss is not known
MAX_REASONS = 2  # shown

_KINDS = {Kind.PARAMETER: "parameters", Kind.GRADIENT: "gradients"}
_SUBJECT_OF_PROBE = {"loss": LOSS, "finite_check": Kind.GRADIENT, "parameters_and_gradients": Kind.PARAMETER}


def find_unseen(view: RunView) -> dict[str, str]:
    """By subject (`LOSS`, `RECORDS`, a kind of layer statistics) a sentence that says what is missing, and why."""
    found = {LOSS: _loss(view), RECORDS: lost_records(view)}
    for kind, name in _KINDS.items():
        if (reasons := _reasons(view, "parameters_and_gradients")) and _is_empty(view, kind):
            found[kind] = f"No {name} could be measured: {reasons}."
    for event in view.events(ProbeDisabled):
        subject = _SUBJECT_OF_PROBE.get(event.probe, "")
        if subject and not event.where and not found.get(subject):
            found[subject] = f"The probe {event.probe!r} failed and was disabled at step {event.step}: {event.error}."
    if Kind.PARAMETER in found:
        found[Kind.UPDATE] = found[Kind.PARAMETER]
    return {subject: sentence for subject, sentence in found.items() if sentence}


def _loss(view: RunView) -> str:
    has_backward = view.counts("backwards") > 0
    num, num_read = int(np.count_nonzero(has_backward)), int(np.count_nonzero(view.losses.has_loss & has_backward))
    if not num or num_read >= MIN_SHARE * num:
        return ""
    steps = "in no step" if not num_read else f"in {num_read:,} of {counted(num, 'step')} only"
    reasons = _reasons(view, "loss")
    return f"The loss was read {steps}{f': {reasons}' if reasons else ''}. Sonde reads the scalar tensor on which backward() is called."


def _reasons(view: RunView, probe: str) -> str:
    prefixes = ("some tensors could not be measured: ", "the loss could not be read: ")
    reasons = dict.fromkeys(event.reason for event in view.events(NotMeasured) if event.probe == probe)
    shown = [reason.removeprefix(prefixes[0]).removeprefix(prefixes[1]) for reason in reasons]
    return listing(shown, MAX_REASONS)


def _is_empty(view: RunView, kind: str) -> bool:
    """Whether there are frames of this kind, and each is of tensors without elements: what could not be measured is written so."""
    has_frames = False
    for block in view.blocks(kind):
        table = block.get(kind)
        if table is not None and "num" in table.fields:
            has_frames = True
            if (table["num"] > 0).any():
                return False
    return has_frames


def lost_records(view: RunView) -> str:
    """Records of this process that could not be written or read. An incomplete record at the end of a log, which every killed process may
    leave, is none."""
    return " ".join(_lost(view))


def _lost(view: RunView) -> Iterator[str]:
    gaps = [gap for segment in view.process.segments for gap in segment.gaps]
    if gaps:
        num = sum(gap.num_dropped for gap in gaps)
        first = min((gap.first_step for gap in gaps if gap.first_step >= 0), default=-1)
        since = f", the first at step {first:,}," if first >= 0 else ""
        yield f"{counted(num, 'record')} of this run{since} could not be written ({gaps[0].reason}): free some space and train again."
    damage = [each for segment in view.process.segments for each in segment.damage]
    if damage:
        num_bytes, size = sum(each.num_bytes for each in damage), sum(segment.size for segment in view.process.segments)
        part = f"{num_bytes:,} of {size:,} bytes" if num_bytes else "A part"
        yield f"{part} of the log of rank {view.rank} could not be read ({damage[0].reason}): copy the run again, or repeat it."
