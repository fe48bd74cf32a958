"""GradientDebugger: records the gradients of a model by hooks on its parameters, or from calls, and builds a report."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from sonde.errors import SondeError, require_count
from sonde.statistics.private_torch_api import tensor_version, unwrap_compiled
from sonde.tools.gradient_flow_animator import EXPLODING, VANISHING, GradientFlowAnimator, measure_gradient
from sonde.tools.gradients.gradient_flow_analysis import GradientSize, combine_sizes
from sonde.tools.gradients.gradient_noise_scale import NoiseScale, NormPair, estimate_noise_scale
from sonde.tools.gradients.gradient_report import GradientReport, build_gradient_report
from sonde.tools.hook_that_never_raises import SafeHook, require_module
from sonde.tools.tensors.describe_tensor import fast_statistics


@dataclass(slots=True)
class _GradientWrites:
    """The gradient of one parameter in the current step."""

    first: GradientSize
    last: GradientSize
    num_writes: int = 1
    versions: tuple[int, int] = (0, 0)  # of the parameter and its gradient; torch increments them at every in-place change


class GradientDebugger:
    """Health, trends and clipping advice for the gradients of a model.

    A layer is a module with parameters of its own; their gradients count as one vector. They are measured as soon as backward has written
    them, before clipping and before a GradScaler unscales them. Only statistics of the last `max_gradient_history` steps are stored.
    A step ends with the `step()` of the optimizer, or else of the GradientDebugger. Without either, a new step begins when a gradient was
    cleared or a parameter was changed since the last write; earlier writes are gradient accumulation.
    """

    def __init__(
        self, max_gradient_history: int = 200, *, vanishing_threshold: float = VANISHING, exploding_threshold: float = EXPLODING,
        micro_batch_size: int | None = None,
    ) -> None:  # fmt: skip
        require_count(max_gradient_history, "max_gradient_history")
        if micro_batch_size is not None:
            _require_positive(micro_batch_size, "micro_batch_size")
        self.flow = GradientFlowAnimator(max_gradient_history, vanishing_threshold, exploding_threshold)
        self._micro_batch_size = micro_batch_size
        self._order: dict[str, None] = {}  # layers in order of depth
        self._layer_of: dict[str, str] = {}  # parameter path -> layer
        self._weights: dict[str, GradientSize] = {}  # parameter path -> size of the parameter at its first gradient
        self._current: dict[str, _GradientWrites] = {}
        self._step = 0
        self._steps_counted_by = ""
        self._pairs: deque[NormPair] = deque(maxlen=max_gradient_history)
        self._norms_at: dict[float, deque[float]] = {}
        self._hooks = ExitStack()
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lock = threading.RLock()  # backward on a device runs in another thread

    def register_hooks(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Puts a hook on every parameter that requires a gradient. `remove()`, or the end of a `with`, removes all hooks."""
        model = require_module(model, "register_hooks")  # parameter names of the model before torch.compile
        trainable = [(path, parameter) for path, parameter in model.named_parameters() if parameter.requires_grad]
        if not trainable:
            advice = "If all parameters are frozen, call parameter.requires_grad_(True)."
            raise SondeError(f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to record.\n{advice}")
        for path, parameter in trainable:
            self._assign_layer(path)
            known = self._hooked.get(id(parameter))
            if known is None or known() is not parameter:
                hook = SafeHook(f"the gradient of {path}", partial(self._on_gradient_written, path))
                self._hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
                self._hooked[id(parameter)] = weakref.ref(parameter)
        if optimizer is not None:
            self._steps_counted_by = "a step is an optimizer step"
            hook = SafeHook("the optimizer's step", lambda *_: self._end_step())
            self._hooks.callback(optimizer.register_step_post_hook(hook).remove)
        return self

    def remove(self) -> None:
        """Removes all hooks. Recorded steps stay."""
        self._hooks.close()
        self._hooked.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def record_gradient_flow(self, layer: str, gradients: Any) -> None:
        """Records one gradient: a tensor, array or list. The same layer again begins a new step, unless you call `step()`."""
        if not isinstance(layer, str):
            raise SondeError(f"A layer name is a string, not {layer!r} of type {type(layer).__name__}.")
        size = measure_gradient(layer, gradients)
        with self._lock:
            if layer in self._current and not self._steps_counted_by:
                self._end_step()
            self._order.setdefault(layer)
            self._layer_of[layer] = layer
            self._current[layer] = _GradientWrites(size, size)

    def record_model(self, model: nn.Module) -> None:
        """Records the current `.grad` of all parameters as one step, for use without hooks."""
        with self._lock:
            self._end_step()
            for path, parameter in (unwrap_compiled(model) or model).named_parameters():
                if parameter.requires_grad:
                    self._assign_layer(path)
                    self._on_gradient_written(path, parameter)
            self._end_step()

    def record_norm_at(self, batch_size: float, norm: float) -> None:
        """Records the gradient norm of the whole model at a batch size; ten norms at each of two sizes give the noise scale."""
        _require_positive(batch_size, "batch_size")
        if isinstance(norm, bool) or not isinstance(norm, (int, float)):
            raise SondeError(f"norm must be the gradient norm of the model as a number, not {norm!r}. For a tensor pass norm.item().")
        self._norms_at.setdefault(float(batch_size), deque(maxlen=self.flow.max_frames)).append(float(norm))

    def step(self) -> None:
        """Ends the current step. From the first call on, only `step()` ends steps, unless an optimizer was passed."""
        with self._lock:
            self._steps_counted_by = self._steps_counted_by or "a step ends with step()"
            self._end_step()

    def _assign_layer(self, path: str) -> None:
        self._layer_of[path] = layer = path.rpartition(".")[0] or path
        self._order.setdefault(layer)

    def _on_gradient_written(self, path: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        with self._lock:
            versions = (tensor_version(parameter), tensor_version(gradient))
            known = self._current.get(path)
            # Within a step each backward adds to the gradient in place once, and the parameter does not change.
            if known is not None and not self._steps_counted_by and versions != (known.versions[0], known.versions[1] + 1):
                self._end_step()
                known = None
            stats = fast_statistics(gradient)
            if stats.unsupported:
                raise TypeError(stats.unsupported)
            size = GradientSize.from_statistics(stats)
            if known is None:
                self._current[path] = _GradientWrites(size, size, versions=versions)
            else:
                known.last, known.versions, known.num_writes = size, versions, known.num_writes + 1
            if path not in self._weights:
                self._weights[path] = GradientSize.from_statistics(fast_statistics(parameter))

    def _end_step(self) -> None:
        with self._lock:
            if not self._current:
                return
            self.flow.record_sizes(self._step, self._by_layer({path: written.last for path, written in self._current.items()}))
            counts = {written.num_writes for written in self._current.values()}
            if len(counts) == 1 and (num := counts.pop()) > 1:
                # The first write is the gradient of one micro-batch, the last one the sum over all, with the same loss scale.
                first = combine_sizes(written.first for written in self._current.values()).norm
                total = combine_sizes(written.last for written in self._current.values()).norm
                self._pairs.append(NormPair(1.0, first * first, float(num), (total / num) * (total / num)))
            self._current = {}
            self._step += 1

    def _by_layer(self, by_path: Mapping[str, GradientSize]) -> dict[str, GradientSize]:
        parts: dict[str, list[GradientSize]] = {}
        for path, size in by_path.items():
            parts.setdefault(self._layer_of[path], []).append(size)
        return {layer: combine_sizes(sizes) for layer, sizes in parts.items()}

    def analyze(self) -> GradientReport:
        """Builds the report of the recorded steps, the current one included. Recording continues."""
        with self._lock:
            flow = GradientFlowAnimator(0, self.flow.vanishing_threshold, self.flow.exploding_threshold)
            if self._current:
                flow.record_sizes(self._step, self._by_layer({path: written.last for path, written in self._current.items()}))
            scales = {layer: size.norm for layer, size in self._by_layer(self._weights).items() if math.isfinite(size.norm)}
            return build_gradient_report(
                [*self.flow.frames, *flow.frames], list(self._order), scales, vanishing_threshold=flow.vanishing_threshold,
                exploding_threshold=flow.exploding_threshold, noise=self._noise_scale(),
                steps_counted_by=self._steps_counted_by or "a step begins after cleared gradients or changed parameters",
            )  # fmt: skip

    analyze_gradient_flow = analyze

    def _noise_scale(self) -> NoiseScale:
        if len(self._norms_at) >= 2:
            small, big = min(self._norms_at), max(self._norms_at)
            norms = zip(self._norms_at[small], self._norms_at[big])
            return estimate_noise_scale((NormPair(small, low * low, big, high * high) for low, high in norms), "samples")
        size = self._micro_batch_size or 1
        pairs = (pair._replace(small_batch=pair.small_batch * size, big_batch=pair.big_batch * size) for pair in self._pairs)
        return estimate_noise_scale(pairs, "samples" if self._micro_batch_size else "micro-batches")


GradientAnalyzer = GradientDebugger


def _require_positive(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise SondeError(f"{name} must be a number of samples above 0, for instance {name}=32, not {value!r}.")
