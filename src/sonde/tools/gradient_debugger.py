"""Gradients of a model in training, watched by hooks on its parameters or recorded by hand, and judged when somebody asks."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from sonde.errors import SondeError
from sonde.tools.gradient_flow_animator import EXPLODING, VANISHING, GradientFlowAnimator, size_of
from sonde.tools.gradient_flow_frames import Size, joined
from sonde.tools.gradient_noise_scale import Pair, noise_scale
from sonde.tools.gradient_report import GradientReport, judge
from sonde.tools.safe_hook import Contained
from sonde.tools.tensor_statistics import quick


@dataclass(slots=True)
class _Written:
    """One gradient within the step that is open."""

    first: Size
    last: Size
    num_writes: int = 1
    versions: tuple[int, int] = (0, 0)  # of the parameter and of its gradient, which torch counts up at every change in place


class GradientDebugger:
    """Health, trends and clipping advice for the gradients of a model.

    A layer is a module with parameters of its own: the gradients of its parameters are taken together, each tied parameter once.
    Gradients are measured as backward wrote them, before clipping and before a GradScaler unscales them; only numbers are kept, of the
    last `max_gradient_history` steps.

    How a step is told: by the optimizer's step where an optimizer is given; else by calls of `step()`; else a gradient that was cleared
    or a parameter that was changed since the last write begins a new step, and further writes before that are accumulation.
    """

    def __init__(
        self,
        max_gradient_history: int = 200,
        *,
        vanishing_threshold: float = VANISHING,
        exploding_threshold: float = EXPLODING,
        micro_batch_size: int | None = None,
    ) -> None:
        if isinstance(max_gradient_history, bool) or not isinstance(max_gradient_history, int) or max_gradient_history < 1:
            raise SondeError(f"max_gradient_history must be a whole number of steps from 1 on, not {max_gradient_history!r}.")
        if micro_batch_size is not None and not micro_batch_size > 0:
            raise SondeError(f"micro_batch_size must be a number of samples above 0, not {micro_batch_size!r}.")
        self.flow = GradientFlowAnimator(max_gradient_history, vanishing_threshold, exploding_threshold)
        self._micro_batch_size = micro_batch_size
        self._order: dict[str, None] = {}  # layers, by depth
        self._layer_of: dict[str, str] = {}  # parameter path -> layer
        self._weights: dict[str, Size] = {}  # parameter path -> its own size, when it first got a gradient
        self._open: dict[str, _Written] = {}
        self._step = 0
        self._told_by = ""
        self._pairs: deque[Pair] = deque(maxlen=max_gradient_history)
        self._norms_at: dict[float, deque[float]] = {}
        self._handles: list[Any] = []
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lock = threading.RLock()  # a backward on a device runs in a thread of its own

    # -- watching ----------------------------------------------------------------------------------

    def register_hooks(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Watch every parameter of `model` that requires a gradient now. `remove()`, or leaving a `with`, takes all hooks off again."""
        if not isinstance(model, nn.Module):
            raise SondeError(f"register_hooks takes a torch.nn.Module, not a {type(model).__name__}.")
        model = getattr(model, "_orig_mod", model)  # the names inside a compiled model are those of the model itself
        trainable = [(path, parameter) for path, parameter in model.named_parameters() if parameter.requires_grad]
        if not trainable:
            raise SondeError(
                f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to watch.\n"
                "Is all of it frozen? parameter.requires_grad_(True) thaws it."
            )
        for path, parameter in trainable:
            self._place(path)
            known = self._hooked.get(id(parameter))
            if known is None or known() is not parameter:
                hook = Contained(f"the gradient of {path}", partial(self._wrote, path))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                self._hooked[id(parameter)] = weakref.ref(parameter)
        if optimizer is not None:
            self._told_by = "a step is an optimizer step"
            hook = Contained("the optimizer's step", lambda *_: self._close())
            self._handles.append(optimizer.register_step_post_hook(hook))
        return self

    def remove(self) -> None:
        """Take every hook off. What was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # -- recording ---------------------------------------------------------------------------------

    def record_gradient_flow(self, layer: str, gradients: Any) -> None:
        """One gradient by hand: a tensor, array or list. The same layer once more begins a new step, unless you call `step()`."""
        if not isinstance(layer, str):
            raise SondeError(f"A layer is named by a text, not by {layer!r} of type {type(layer).__name__}.")
        size = size_of(layer, gradients)
        with self._lock:
            if layer in self._open and not self._told_by:
                self._close()
            self._order.setdefault(layer)
            self._layer_of[layer] = layer
            self._open[layer] = _Written(size, size)

    def record_model(self, model: nn.Module) -> None:
        """The gradients that a model has now, as one step: for those who put no hooks on it."""
        with self._lock:
            self._close()
            for path, parameter in getattr(model, "_orig_mod", model).named_parameters():
                if parameter.requires_grad:
                    self._place(path)
                    self._wrote(path, parameter)
            self._close()

    def record_norm_at(self, batch_size: float, norm: float) -> None:
        """The gradient norm of the whole model for a batch of this size; two sizes, ten times each, give the noise scale."""
        if not batch_size > 0:
            raise SondeError(f"batch_size must be above 0, not {batch_size!r}.")
        at = self._norms_at.setdefault(float(batch_size), deque(maxlen=self.flow.max_frames))
        at.append(float(norm))

    def step(self) -> None:
        """The step is over. From the first call on, steps end here and nowhere else, except where an optimizer was given."""
        with self._lock:
            self._told_by = self._told_by or "a step ends with step()"
            self._close()

    def _place(self, path: str) -> None:
        """To which layer a parameter belongs, and where that stands."""
        self._layer_of[path] = layer = path.rpartition(".")[0] or path
        self._order.setdefault(layer)

    def _wrote(self, path: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        with self._lock:
            versions = (parameter._version, gradient._version)
            known = self._open.get(path)
            # Within a step torch adds to the gradient in place, once for each backward, and nobody changes the parameter.
            if known is not None and not self._told_by and versions != (known.versions[0], known.versions[1] + 1):
                self._close()
                known = None
            found = quick(gradient)
            if found.unsupported:
                raise TypeError(found.unsupported)
            size = Size.of(found)
            if known is None:
                self._open[path] = _Written(size, size, versions=versions)
            else:
                known.last, known.versions, known.num_writes = size, versions, known.num_writes + 1
            if path not in self._weights:
                self._weights[path] = Size.of(quick(parameter))

    def _close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self.flow.record_sizes(self._step, self._sizes())
            counts = {written.num_writes for written in self._open.values()}
            if len(counts) == 1 and (num := counts.pop()) > 1:
                # The first write is the gradient of one micro-batch, the last one the sum over all: both scaled alike.
                first = joined(written.first for written in self._open.values()).norm
                total = joined(written.last for written in self._open.values()).norm
                self._pairs.append(Pair(1.0, first * first, float(num), (total / num) * (total / num)))
            self._open = {}
            self._step += 1

    def _sizes(self) -> dict[str, Size]:
        """The open step, parameters joined to layers."""
        parts: dict[str, list[Size]] = {}
        for path, written in self._open.items():
            parts.setdefault(self._layer_of[path], []).append(written.last)
        return {layer: joined(sizes) for layer, sizes in parts.items()}

    # -- judging -----------------------------------------------------------------------------------

    def analyze(self) -> GradientReport:
        """What the recorded steps say, the open one included. Nothing is changed: recording goes on."""
        with self._lock:
            flow = GradientFlowAnimator(0, self.flow.vanishing_threshold, self.flow.exploding_threshold)
            if self._open:
                flow.record_sizes(self._step, self._sizes())
            weights: dict[str, list[Size]] = {}
            for path, size in self._weights.items():
                weights.setdefault(self._layer_of[path], []).append(size)
            return judge(
                [*self.flow.frames, *flow.frames],
                list(self._order),
                {layer: norm for layer, sizes in weights.items() if math.isfinite(norm := joined(sizes).norm)},
                vanishing_threshold=flow.vanishing_threshold,
                exploding_threshold=flow.exploding_threshold,
                noise=noise_scale(*self._measured_noise()),
                steps_told_by=self._told_by or "a step is told by cleared gradients or changed parameters",
            )

    analyze_gradient_flow = analyze

    def _measured_noise(self) -> tuple[list[Pair], str]:
        if len(self._norms_at) >= 2:
            small, big = min(self._norms_at), max(self._norms_at)
            pairs = zip(self._norms_at[small], self._norms_at[big])
            return [Pair(small, low * low, big, high * high) for low, high in pairs], "samples"
        size = self._micro_batch_size
        if size is None:
            return list(self._pairs), "micro-batches"
        scaled = [pair._replace(small_batch=pair.small_batch * size, big_batch=pair.big_batch * size) for pair in self._pairs]
        return scaled, "samples"


GradientAnalyzer = GradientDebugger
