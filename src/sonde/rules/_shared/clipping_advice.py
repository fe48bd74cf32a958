"""Advice about gradient clipping, which depends on whether and where the program clips already."""

from typing import NamedTuple

from sonde.events import CallSiteFound
from sonde.run_view import RunView


class Clipping(NamedTuple):
    """The first line that clips gradients."""

    line: str  # empty if none does
    is_after_update: bool

    @classmethod
    def of(cls, view: RunView) -> "Clipping":
        found = next((site for site in view.events(CallSiteFound) if site.call == "clip"), None)
        return cls("", False) if found is None else cls(found.line or "another line", bool(found.is_after_update))

    @property
    def state(self) -> str:
        """For the evidence of a finding."""
        return "no" if not self.line else "after the update" if self.is_after_update else "yes"

    @property
    def without_effect(self) -> str:
        """For the end of a sentence: that the clipping has no effect; empty if it has one, or if there is none."""
        return f"; the clipping at {self.line} comes after the update and has no effect" if self.is_after_update else ""

    @property
    def advice(self) -> str:
        if not self.line:
            return "clip gradients with torch.nn.utils.clip_grad_norm_"
        if self.is_after_update:
            return f"move the clipping at {self.line} between backward() and optimizer.step(): after the update it has no effect"
        return f"clip gradients to a smaller norm than at {self.line}"
