"""When one training step ends and the next begins.

A step is one update of the parameters. With one optimizer it ends when that optimizer has stepped; with several (GANs) with the last one of
their cycle, which is learnt from the first repetition. Loops that never step an optimizer advance by manual updates of the parameters or,
when the update was forgotten, by gradients being cleared and made again. Each method returns whether the current step has ended.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

PATIENCE = 3  # times: SAM and the like also clear gradients or move parameters by hand once before an optimizer steps
LONGEST_ACCUMULATION = 64  # backward calls without any update: beyond it, each is taken as a step of its own


@dataclass(slots=True)
class StepBoundaries:
    """Counts the steps of one training loop."""

    number: int = 0  # of the step that is under way
    is_active: bool = False  # anything happened since the last step ended
    num_optimizers: int = 0
    _anchor: Hashable = None  # the optimizer whose step ends a step
    _stepped: dict[Hashable, None] = field(default_factory=dict)  # optimizers that stepped in this step, in order
    _num_backwards: int = 0  # in this step
    _ever_stepped: bool = False
    _num_restarts: int = 0  # times in a row that a new iteration began although no optimizer ever stepped
    _is_next_open: bool = False  # the call that ended the step is the first of the next one
    _next_backwards: int = 0

    @property
    def num_stepped(self) -> int:
        """Optimizers that stepped in this step so far."""
        return len(self._stepped)

    def end_step(self) -> None:
        """The current step is over."""
        self.number += 1
        self.is_active, self._is_next_open = self._is_next_open, False
        self._stepped.clear()
        self._num_backwards, self._next_backwards = self._next_backwards, 0

    def on_optimizer_step_start(self, key: Hashable) -> bool:
        """True: the current step had ended already, before this optimizer's cycle began anew."""
        self.is_active = True
        if key not in self._stepped:
            return False
        self._anchor = next(reversed(self._stepped))
        self._is_next_open = True
        return True

    def on_optimizer_step_end(self, key: Hashable) -> bool:
        self._stepped[key] = None
        self._ever_stepped = True
        self._num_restarts = 0
        return key == self._anchor or (self.num_optimizers <= 1 and self._anchor is None)

    def on_zero_grad(self, key: Hashable) -> bool:
        """Clearing the gradients of an optimizer that stepped before others did begins their cycle anew."""
        self.is_active = True
        return key != next(reversed(self._stepped), None) and self.on_optimizer_step_start(key)

    def on_batch_start(self) -> bool:
        """Fetching the next batch ends the first step of a cycle that is not known yet."""
        if self._stepped and (self._anchor is None or self._anchor not in self._stepped):
            self._anchor = next(reversed(self._stepped))
            return True
        self.is_active = True
        return False

    def on_backward_start(self, *, has_cleared: bool, has_moved: bool) -> bool:
        """`has_cleared`: gradients that were there are gone; `has_moved`: parameters changed although no optimizer stepped."""
        self.is_active = True
        ended = False
        if not self._stepped and self._num_backwards:
            is_new_iteration = (has_cleared or has_moved) and not self._ever_stepped
            self._num_restarts += is_new_iteration
            is_manual = has_moved and self.num_optimizers == 0  # without an optimizer, moving by hand is the way to step
            ended = (is_new_iteration and (is_manual or self._num_restarts > PATIENCE)) or self._num_backwards >= LONGEST_ACCUMULATION
        if ended:
            self._is_next_open, self._next_backwards = True, 1
        else:
            self._num_backwards += 1
        return ended
