"""Hooks on one model and its optimizers: taps on the layers that some hook selects, and signals where steps begin and end."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from sonde.capture.gradient_state import optimizer_parameters
from sonde.errors import SondeError
from sonde.rules.words import listing
from sonde.statistics import reductions
from sonde.statistics.tensor_utils import read_scalar
from sonde.tools.hooks.hook import HookAction
from sonde.tools.hooks.hook_actions import Registered
from sonde.tools.hooks.module_hooks import Layers, Listener, Signal, Tap

MAX_NAMED = 8  # parameters with a bad gradient that are looked at in one step
_MAY_STOP = frozenset({HookAction.STOP_TRAINING, HookAction.CUSTOM_CALLBACK})
_log = logging.getLogger("sonde")


class Attachment:
    """Keeps neither the model nor an optimizer alive. `remove` leaves nothing behind."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], listener: Listener) -> None:
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._listener = listener
        self._taps: dict[str, Tap] = {}
        self._handles: list[Any] = []
        self._door: Any = None
        self._said_unseen = False

    @property
    def has_optimizer(self) -> bool:
        return bool(self._optimizers)

    def connect(self, before_update: Callable[[int], None], after_update: Callable[[int], None]) -> None:
        """Both are told which optimizer it is: the steps of the first are the steps."""
        for index, ref in enumerate(self._optimizers):
            optimizer = ref()
            if optimizer is not None:
                before, after = partial(before_update, index), partial(after_update, index)
                self._handles += [optimizer.register_step_pre_hook(Signal(before)), optimizer.register_step_post_hook(Signal(after))]

    def plan(self, hooks: Sequence[Registered], entered: Callable[[], None], *, careful: bool) -> dict[str, list[Registered]]:
        """Put taps where hooks want them, take off those that nobody wants any more, and say who stands where.

        `careful` leaves those that never fired: perhaps they are inside compiled code, which would be compiled again without them.
        """
        model = self._model()
        everywhere = [each for each in hooks if not each.hook.is_per_step]
        plan: dict[str, list[Registered]] = {}
        if model is None:
            return plan
        layers = Layers(model) if everywhere else None
        for each in everywhere:
            assert layers is not None
            each.layers = tuple(_selected(each, layers))
            for name in each.layers:
                plan.setdefault(name, []).append(each)
        if layers is not None:
            self._tell_unseen(layers)
            for name in plan.keys() - self._taps.keys():
                self._taps[name] = Tap(name, layers.modules[name], self._listener)
        for name in self._taps.keys() - plan.keys():
            if self._taps[name].num_calls or not careful:
                self._taps.pop(name).remove()
        wants_door = any(not _MAY_STOP.isdisjoint(each.hook.actions) for each in hooks)
        if wants_door and self._door is None:
            self._door = model.register_forward_pre_hook(Signal(entered))
        elif self._door is not None and not wants_door and not careful:
            self._door.remove()
            self._door = None
        return plan

    def gradient_norm(self) -> float | None:
        """Of all gradients that the optimizers would use now; None where there is no gradient."""
        gradients = [p.grad for p in self._parameters(self._optimizers) if p.grad is not None]
        return float(reductions.check_finite(gradients)[0] ** 0.5) if gradients else None

    def bad_gradients(self, optimizer: int) -> list[tuple[str, torch.Tensor]]:
        """Parameters whose gradient, which this optimizer is about to use, is not finite. Costs one read of them all where all is well."""
        parameters = [p for p in self._parameters(self._optimizers[optimizer : optimizer + 1]) if p.grad is not None]
        first = reductions.check_finite([p.grad for p in parameters])[1]
        if first < 0:
            return []
        model = self._model()
        names = {id(p): name for name, p in (getattr(model, "_orig_mod", model) or nn.Module()).named_parameters()}
        bad = (p for p in parameters[first:] if reductions.check_finite([p.grad])[1] == 0)
        return [(names.get(id(p), "a parameter outside of the model"), p.grad) for p in islice(bad, MAX_NAMED) if p.grad is not None]

    def _parameters(self, refs: Iterable[weakref.ref[torch.optim.Optimizer]]) -> list[torch.Tensor]:
        """Of these optimizers; where there are none, of the model."""
        optimizers, model = [optimizer for ref in refs if (optimizer := ref()) is not None], self._model()
        if not self._optimizers and model is not None:
            return list(model.parameters())
        return [p for optimizer in optimizers for p in optimizer_parameters(optimizer)]

    def learning_rate(self) -> float | None:
        optimizer = self._optimizers[0]() if self._optimizers else None
        return read_scalar(optimizer.param_groups[0]["lr"]) if optimizer is not None else None

    def remove(self) -> None:
        for tap in self._taps.values():
            tap.remove()
        for handle in (*self._handles, *([self._door] if self._door is not None else [])):
            handle.remove()
        self._taps, self._handles, self._door = {}, [], None

    def _tell_unseen(self, layers: Layers) -> None:
        if layers.unseen and not self._said_unseen:
            self._said_unseen = True
            reasons = [f"{path or 'the whole model'}: {reason.partition(';')[0]}" for path, reason in layers.unseen]
            _log.warning("sonde: hooks do not see everything. %s.", listing(reasons))


def checked(model: Any, optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers as a list; a letter where something else was given."""
    if not isinstance(model, nn.Module):
        raise SondeError(f"hooks are attached to a torch.nn.Module, not to {type(model).__name__}. Pass the model itself.")
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for each in given:
        if not isinstance(each, torch.optim.Optimizer):
            raise SondeError(f"optimizer must be a torch.optim.Optimizer or a list of them, not {type(each).__name__}.")
    return given


def _selected(registered: Registered, layers: Layers) -> Iterable[str]:
    patterns = registered.hook.patterns
    seen: set[int] = set()  # a module with two names fires once
    for name in layers.leaves if patterns is None else patterns.select(layers.modules):
        if name not in layers.hidden and id(layers.modules[name]) not in seen:
            seen.add(id(layers.modules[name]))
            yield name
