"""The places that keep tensors of many steps alive, as the leak detector found them during the training."""

from typing import NamedTuple

from sonde.events import LeaksInvestigated
from sonde.rules._shared.read_event_tables import amount, text
from sonde.run_view import RunView


class FoundLeak(NamedTuple):
    """Tensors that accumulate in one place."""

    step: int
    holder: str  # "train() local 'losses' -> list[90]"
    cause: str
    fix: str
    num_bytes: float
    num_nodes: float  # of autograd graphs that they keep alive
    line: str  # that stores them: "train.py:41"; empty if it is not known
    line_text: str


def found_leaks(view: RunView) -> list[FoundLeak]:
    """The leaks of all investigations, in their order."""
    return [
        FoundLeak(
            event.step,
            text(leak, "holder"),
            text(leak, "cause").rstrip("."),
            text(leak, "fix").rstrip("."),
            amount(leak, "num_bytes"),
            amount(leak, "num_nodes"),
            text(leak, "line"),
            text(leak, "text"),
        )
        for event in view.events(LeaksInvestigated)
        for leak in event.leaks
    ]
