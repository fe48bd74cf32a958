"""How long an epoch is, in steps: from the passes over a DataLoader, from what a framework reports, or from the distance of evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sonde.events import DataPass, FrameworkEpochStarted

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

FEWEST = 3  # beginnings: two of them may be a trial and the first epoch
MAX_LOADERS = 50
MAX_RECREATED = 2000  # as many passes as are recorded


@dataclass(slots=True)
class Spacing:
    """Beginnings at different steps: how many, from where to where."""

    num: int = 0
    first: int = -1
    last: int = -1

    def add(self, step: int) -> None:
        if step == self.last:
            return
        self.first = step if self.num == 0 else self.first
        self.num += 1
        self.last = step

    @property
    def length(self) -> float:
        return (self.last - self.first) / (self.num - 1) if self.num >= FEWEST else 0.0


@dataclass(slots=True)
class RecordedEpochLoop:
    """The loop over epochs in the user's code, around one loader."""

    num_planned: int
    line: str
    break_lines: list[str]
    num_passes: int = 0  # one in each round of the loop
    is_regular: bool = True


@dataclass(slots=True)
class Epochs:
    """What is known about the epochs of a run."""

    loaders: dict[int, Spacing] = field(default_factory=dict)
    loops: dict[int, RecordedEpochLoop] = field(default_factory=dict)  # by loader
    num_batches: dict[int, int] = field(default_factory=dict)
    framework: Spacing = field(default_factory=Spacing)
    evaluations: Spacing = field(default_factory=Spacing)
    recreated: dict[int, int] = field(default_factory=dict)  # a loader of a later round -> the loader of the first round

    @classmethod
    def of(cls, view: RunView) -> Epochs:
        epochs = cls()
        for event in view.events(DataPass):
            epochs._add_pass(event)
        for started in view.events(FrameworkEpochStarted):
            epochs.framework.add(started.step)
        evaluated = view.step_numbers[np.flatnonzero(view.counts("eval_forwards"))]
        if len(evaluated):
            epochs.evaluations = Spacing(len(evaluated), int(evaluated[0]), int(evaluated[-1]))
        return epochs

    def _add_pass(self, event: DataPass) -> None:
        first = self._first_of_recreated(event)
        loader = first if first is not None else event.loader
        if loader not in self.loaders and len(self.loaders) >= MAX_LOADERS:
            return
        self.loaders.setdefault(loader, Spacing()).add(event.step)
        if event.num_batches is not None:
            self.num_batches[loader] = event.num_batches
        known = self.loops.get(loader)
        if known is None:
            known = self.loops[loader] = RecordedEpochLoop(event.num_rounds or 0, event.loop_line or "", list(event.break_lines or ()))
        is_next = (
            event.round_index == known.num_passes
            and (first is not None or event.pass_number == known.num_passes + 1)
            and not event.is_last_recorded
        )
        known.is_regular = known.is_regular and event.num_rounds == known.num_planned and is_next
        known.num_passes += 1

    def _first_of_recreated(self, event: DataPass) -> int | None:
        """`for x, y in DataLoader(…):` creates another loader in each round of the epoch loop: the one of the first round, or None."""
        loader = event.loader
        if loader not in self.loaders and loader not in self.recreated and event.loop_line and len(self.recreated) < MAX_RECREATED:
            for first, loop in self.loops.items():
                is_alike = loop.line == event.loop_line and self.num_batches.get(first) == event.num_batches
                if is_alike and loop.is_regular and loop.num_passes == event.round_index and event.pass_number == 1:
                    self.recreated[loader] = first
                    break
        return self.recreated.get(loader)

    @property
    def sure_length(self) -> float:
        """Steps in a pass over the data; 0 if it is not known."""
        # Beside the loader that trains there may be others that are short and start more often.
        return max((spacing.length for spacing in self.loaders.values()), default=0.0) or self.framework.length

    @property
    def length(self) -> float:
        """The same, or from evaluation to evaluation, which most loops make once per epoch."""
        return self.sure_length or self.evaluations.length

    @property
    def num(self) -> int:
        """Epochs that were begun; 0 if that is not known."""
        spacings = [*self.loaders.values(), self.framework, self.evaluations]
        return next((each.num for each in spacings if each.length and each.length == self.length), 0)

    @property
    def loop(self) -> RecordedEpochLoop | None:
        """The last epoch loop, if one is known: with a loader that is started once in each of its rounds."""
        known = [each for each in self.loops.values() if each.is_regular and each.num_planned > 0 and each.num_passes]
        return max((each for each in known if each.line == known[-1].line), key=lambda each: each.num_passes, default=None)

    @property
    def num_planned(self) -> int:
        return self.loop.num_planned if self.loop else 0

    def is_beyond_first(self, num_backwards: int) -> bool:
        """At least one pass over the data is known to be over; True also if nothing is known of passes."""
        if any(spacing.num >= FEWEST for spacing in (*self.loaders.values(), self.framework)):
            return True
        return not self.loaders or (bool(self.num_batches) and num_backwards >= max(self.num_batches.values()))
