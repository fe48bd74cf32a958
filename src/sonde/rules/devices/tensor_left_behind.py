"""A tensor that a model uses stays on the CPU when the model is moved to a device.

What it finds    a tensor that is a plain attribute of a module (self.mask = torch.ones(…)), which model.to(device) does not move, and that
                 is transferred again whenever it is used.
Why it matters   each time, the training waits for a copy that is not needed; such tensors are also missing from checkpoints.
How it knows     most parameters of the model are on a device, the attribute is on the CPU, and a line of the training moves it: in two
                 steps in a row, or with its name in the line.
Known problems   an attribute that no line moves, and parameters or buffers on the CPU (offloading), are an info. Tensors with a single
                 number do not count.
Fix              self.register_buffer("mask", torch.ones(…)), with persistent=False if it does not belong into a checkpoint.
"""

import re
from collections.abc import Mapping
from typing import Any

from sonde.events import OwnershipChanged, Severity, TransfersMeasured
from sonde.formatting import listing, number
from sonde.rules._shared.read_event_tables import amount, text
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

MAX_TENSORS = 20  # that are named in one finding or searched for in the lines


def check(view: RunView) -> Result:
    states = view.events_with_rows(OwnershipChanged)
    if not states:
        return NotEvaluated("no watched model has trained")
    tensors = list(states[-1][1].left_behind or ())[:MAX_TENSORS]
    if not tensors:
        return Clear()
    first_row = next(row for row, state in states if state.left_behind)
    lines = [_line_that_moves(tensor, view) for tensor in tensors]
    moved = [(tensor, line) for tensor, line in zip(tensors, lines) if line[0]]
    line, source_text = moved[0][1] if moved else ("", "")
    named = [tensor for tensor, _ in moved] or tensors
    names = listing([text(tensor, "path") for tensor in named])
    num_elements = sum(amount(tensor, "num_elements") for tensor in named)
    state = f"is transferred again whenever it is used, at {line}" if moved else "is on the CPU"
    return RULE.finding(
        Severity.WARNING if moved else Severity.INFO,
        view.step_number(first_row),
        cause=f"the model is on {text(named[0], 'model_on') or 'a device'}, and {names} ({number(num_elements)} numbers) {state}",
        fix="register it, so that model.to(device) moves it: self.register_buffer(name, tensor, persistent=False)",
        evidence={
            "num_tensors": len(named),
            "num_elements": num_elements,
            "kind": text(named[0], "kind"),
            **source_evidence(line, source_text),
        },
        where=text(named[0], "path"),
    )


def _line_that_moves(tensor: Mapping[str, Any], view: RunView) -> tuple[str, str]:
    """The line that moves an attribute, and its text; empty if none is known."""
    if text(tensor, "kind") != "attribute":
        return "", ""
    path = text(tensor, "path")
    measured = view.remember(_lines_by_attribute)
    if path in measured:
        return measured[path]
    moves = re.compile(rf"\.{re.escape(path.rpartition('.')[2])}\b[^=]*\.(to|cuda)\(")
    texts = view.call_sites.texts
    line = next((line for line in view.call_sites.lines.get("transfer", ()) if moves.search(texts.get(line, ""))), "")
    return line, texts.get(line, "")


def _lines_by_attribute(view: RunView) -> dict[str, tuple[str, str]]:
    """By attribute, the line that was measured moving it, and its text."""
    lines: dict[str, tuple[str, str]] = {}
    for event in view.events(TransfersMeasured):
        for row in event.transfers:
            paths = row.get("held_as")
            if isinstance(paths, list) and len(lines) < MAX_TENSORS:
                lines |= {str(path): (text(row, "line"), text(row, "text")) for path in paths[:MAX_TENSORS]}
    return lines


RULE = Rule("tensor-left-behind", check, page=__doc__)
