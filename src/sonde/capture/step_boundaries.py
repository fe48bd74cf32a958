"""The step clock: when does one training step end and the next begin?

A step is one update of the parameters. With one optimizer it ends when that optimizer has stepped. With several (GANs, an optimizer per
parameter) it ends with the last one of their cycle, which the clock learns from the first repetition. Loops that never step an optimizer
still advance: by manual updates of the parameters, or, when the update was forgotten, by gradients being cleared and made again.
The clock is pure: it is told what happened and answers whether the current step ended.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

PATIENCE = 3  # times: SAM and the like also clear gradients or move parameters by hand once before an optimizer steps
LONGEST_ACCUMULATION = 64  # backward calls without any update: beyond it, each is taken as a step of its own


@dataclass(slots=True)
class StepBoundaries:
    number: int = 0  # of the step that is under way
    active: bool = False  # anything happened since the last step ended
    known_optimizers: int = 0
    _anchor: Hashable = None  # the optimizer whose step ends a step
    _stepped: dict[Hashable, None] = field(default_factory=dict)  # optimizers that stepped in this step, in order
    _backwards: int = 0  # in this step
    _ever_stepped: bool = False
    _without: int = 0  # times in a row that a new iteration began although no optimizer ever stepped
    _opens: bool = False  # the call that ended the step is the first of the next one
    _opening_backwards: int = 0

    @property
    def num_stepped(self) -> int:
        """Optimizers that stepped in this step so far."""
        return len(self._stepped)

    def end(self) -> None:
        """The current step is over."""
        self.number += 1
        self.active, self._opens = self._opens, False
        self._stepped.clear()
        self._backwards, self._opening_backwards = self._opening_backwards, 0

    def optimizer_begins(self, key: Hashable) -> bool:
        """True: the current step had ended already, before this optimizer's cycle began anew."""
        self.active = True
        if key not in self._stepped:
            return False
        self._anchor = next(reversed(self._stepped))
        self._opens = True
        return True

    def optimizer_ended(self, key: Hashable) -> bool:
        self._stepped[key] = None
        self._ever_stepped = True
        self._without = 0
        return key == self._anchor or (self.known_optimizers <= 1 and self._anchor is None)

    def zeroed(self, key: Hashable) -> bool:
        """Clearing the gradients of an optimizer that stepped before others did begins their cycle anew."""
        self.active = True
        if key not in self._stepped or key == next(reversed(self._stepped)):
            return False
        self._anchor = next(reversed(self._stepped))
        self._opens = True
        return True

    def batch_fetched(self) -> bool:
        """Fetching the next batch ends the first step of a cycle that is not known yet."""
        if self._stepped and (self._anchor is None or self._anchor not in self._stepped):
            self._anchor = next(reversed(self._stepped))
            return True
        self.active = True
        return False

    def backward_begins(self, *, cleared: bool, moved: bool) -> bool:
        """`cleared`: gradients that were there are gone; `moved`: parameters changed although no optimizer stepped."""
        self.active = True
        ended = False
        if not self._stepped and self._backwards:
            new_iteration = (cleared or moved) and not self._ever_stepped
            self._without = self._without + 1 if new_iteration else self._without
            patient = moved and self.known_optimizers == 0  # without an optimizer, moving by hand is the way to step
            ended = new_iteration and (patient or self._without > PATIENCE)
            ended = ended or self._backwards >= LONGEST_ACCUMULATION
        if ended:
            self._opens, self._opening_backwards = True, 1
        else:
            self._backwards += 1
        return ended
