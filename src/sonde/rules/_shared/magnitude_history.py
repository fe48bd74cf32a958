"""How large a tensor was in the last observed steps: for findings that show how a number became what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sonde.events import Kind
from sonde.formatting import number
from sonde.run_view import Block, RunView

NUM_STEPS = 8  # observed steps: a line that a person reads at a glance
GREW = 10.0  # times: less is the ordinary variation of a tensor

_NAMES = {Kind.ACTIVATION: "output of {}", Kind.PARAMETER: "{}", Kind.GRADIENT: "gradient of {}"}


class Magnitude(NamedTuple):
    step: int
    largest: float  # absolute value, of the finite elements
    nonfinite: str = ""  # "", "NaN" or "Inf"

    def __str__(self) -> str:
        return f"{number(self.largest)} and {self.nonfinite}" if self.nonfinite and self.largest else self.nonfinite or number(self.largest)


@dataclass(frozen=True, slots=True)
class MagnitudeHistory:
    """One tensor in the last observed steps up to a step."""

    name: str  # "output of fc1"
    magnitudes: Sequence[Magnitude]

    @classmethod
    def of(cls, view: RunView, kind: str, name: str, *, step: int, magnitude_now: float | None = None) -> MagnitudeHistory | None:
        """The tensor of that name; None if it was not measured. A module that is called several times is one tensor.

        Args:
            step: The last step.
            magnitude_now: Its largest value in that step, if it is known: the step may not have been observed.
        """
        wanted = [site.id for site in view.sites.values() if site.name == name]
        rows = view.observed_rows(kind)
        rows = rows[view.step_numbers[rows] <= step][-NUM_STEPS:]
        found = [each for block in view.blocks(kind, rows=rows) for each in _magnitudes(block, kind, wanted)]
        if magnitude_now is not None and not (found and found[-1].step >= step):
            found = [*found, Magnitude(step, magnitude_now)][-NUM_STEPS:]
        return cls(_NAMES[kind].format(view.layer_name(name)), found) if found else None

    def __str__(self) -> str:
        """`output of fc1: 3.1, 8.9, 40, 2.1e+03 at steps 4, 6, 8, 12`."""
        steps = ", ".join(str(each.step) for each in self.magnitudes)
        plural = "s" if len(self.magnitudes) > 1 else ""
        return f"{self.name}: {', '.join(map(str, self.magnitudes))} at step{plural} {steps}"

    @property
    def growth(self) -> str:
        """A clause that says how it has grown; empty if it has not."""
        sizes = [each.largest for each in self.magnitudes]
        smallest = min(sizes[: len(sizes) // 2], default=0.0)
        if not smallest or sizes[-1] < GREW * smallest or sizes[-1] < max(sizes) / 2:
            return ""
        first, last = self.magnitudes[sizes.index(smallest)], self.magnitudes[-1]
        return f"the largest number in the {self.name} went from {first} at step {first.step} to {last} at step {last.step}"


def _magnitudes(block: Block, kind: str, wanted: Sequence[int]) -> list[Magnitude]:
    """One per step of the block in which a wanted site was measured."""
    table = block[kind]
    columns = np.isin(table.site_ids, wanted)
    if not columns.any():
        return []
    is_measured = np.asarray(table["num"][:, columns].any(axis=1))
    largest = np.nan_to_num(np.abs([table["min"][:, columns], table["max"][:, columns]])).max(axis=(0, 2))
    has_nan, has_inf = table["nan"][:, columns].any(axis=1), table["inf"][:, columns].any(axis=1)
    nonfinite = np.where(has_nan, "NaN", np.where(has_inf, "Inf", ""))
    found = zip(block.numbers.tolist(), largest.tolist(), nonfinite.tolist(), is_measured.tolist())
    return [Magnitude(step, size, bad) for step, size, bad, measured in found if measured]
