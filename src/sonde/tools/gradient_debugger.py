"""GradientDebugger: records the gradients of a model by hooks on its parameters, or from calls, and builds a report."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Self

import torch
from torch import nn

from sonde.errors import SondeError, require_count
from sonde.statistics.private_torch_api import CONV, CONV_TRANSPOSE, tensor_version
from sonde.tools.gradient_flow_animator import EXPLODING, VANISHING, GradientFlowAnimator, measure_gradient
from sonde.tools.gradients import gradients_of_run
from sonde.tools.gradients.gradient_flow_analysis import GradientSize, combine_sizes
from sonde.tools.gradients.gradient_noise_scale import NoiseScale, NormPair, estimate_noise_scale
from sonde.tools.gradients.gradient_report import GradientReport, build_gradient_report
from sonde.tools.gradients.inactive_units import InactiveUnits, UnitActivity
from sonde.tools.hook_that_never_raises import SafeHook, require_module
from sonde.tools.tensors.describe_tensor import as_tensor, fast_statistics

BY_OPTIMIZER = "a step is an optimizer step"
MAX_STEPS_OF_RUN = 1000  # that are read, if the history is not limited


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
    A parameter or layer with hooks that is also recorded by hand counts once, as the hook measures it.
    A step ends with the `step()` of the optimizer, or else of the GradientDebugger. Without either, a new step begins when a gradient was
    cleared or a parameter was changed since the last write; earlier writes are gradient accumulation.
    `run` is a function that returns a run: where nothing was recorded, its observed steps are analyzed. A session passes its own run.
    """

    def __init__(
        self, max_gradient_history: int = 200, *, vanishing_threshold: float = VANISHING, exploding_threshold: float = EXPLODING,
        micro_batch_size: int | None = None, run: Callable[[], gradients_of_run.Source | None] | None = None,
    ) -> None:  # fmt: skip
        require_count(max_gradient_history, "max_gradient_history")
        if micro_batch_size is not None:
            _require_positive(micro_batch_size, "micro_batch_size")
        self.flow = GradientFlowAnimator(max_gradient_history, vanishing_threshold, exploding_threshold)
        self._micro_batch_size = micro_batch_size
        self._run = run
        self._order: dict[str, None] = {}  # layers in order of depth
        self._layer_of: dict[str, str] = {}  # parameter path -> layer
        self._weights: dict[str, GradientSize] = {}  # parameter path -> size of the parameter at its first gradient
        self._units: dict[str, UnitActivity] = {}  # parameter path -> which of its rows have a gradient
        self._without_units: set[str] = set()  # parameter paths of which rows are no units, as of an embedding
        self._measured_by_hooks: set[str] = set()  # parameter paths and layers
        self._current: dict[str, _GradientWrites] = {}
        self._last: dict[str, GradientSize] = {}  # parameter path -> size, of the last frame
        self._applied: deque[tuple[int, float]] = deque(maxlen=max_gradient_history)  # step, share of the gradient that the optimizer used
        self._step = 0
        self._steps_counted_by = ""
        self._pairs: deque[NormPair] = deque(maxlen=max_gradient_history)
        self._norms_at: dict[float, deque[float]] = {}
        self._hooks = ExitStack()
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._parameters: dict[str, weakref.ref[torch.Tensor]] = {}
        self._lock = threading.RLock()  # backward on a device runs in another thread

    @classmethod
    def from_run(cls, run: gradients_of_run.Source) -> Self:
        """The gradients of the observed steps of a run, as the optimizer received them."""
        source = gradients_of_run.open_run(run)  # a wrong path raises here, not later
        return cls(run=lambda: source)

    def register_hooks(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Puts a hook on every parameter that requires a gradient. `remove()`, or the end of a `with`, removes all hooks."""
        model = require_module(model, "register_hooks")  # parameter names of the model before torch.compile
        if optimizer is not None and not callable(getattr(optimizer, "register_step_post_hook", None)):
            example = "For instance register_hooks(model, torch.optim.SGD(model.parameters(), lr=0.1)), or leave it out."
            raise SondeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}: its step() ends a step.\n{example}")
        trainable = [(path, parameter) for path, parameter in model.named_parameters() if parameter.requires_grad]
        if not trainable:
            advice = "If all parameters are frozen, call parameter.requires_grad_(True)."
            raise SondeError(f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to record.\n{advice}")
        self._assign_layers(model)
        for path, parameter in trainable:
            self._parameters[path] = weakref.ref(parameter)
            known = self._hooked.get(id(parameter))
            if known is None or known() is not parameter:
                hook = SafeHook(f"the gradient of {path}", partial(self._on_gradient_written, path))
                self._hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
                self._hooked[id(parameter)] = weakref.ref(parameter)
        if optimizer is not None:
            self._steps_counted_by = BY_OPTIMIZER
            before = SafeHook("the gradient that the optimizer uses", lambda optimizer, *_: self._measure_applied_share(optimizer))
            self._hooks.callback(optimizer.register_step_pre_hook(before).remove)
            after = SafeHook("the optimizer's step", lambda *_: self._end_step())
            self._hooks.callback(optimizer.register_step_post_hook(after).remove)
        return self

    def remove(self) -> None:
        """Removes all hooks. Recorded steps stay."""
        self._hooks.close()
        for of_hooks in (self._hooked, self._parameters, self._measured_by_hooks):
            of_hooks.clear()

    def clear(self) -> None:
        """Drops all recorded steps and begins at step 0. Hooks stay."""
        with self._lock:
            self.flow.clear()
            self._order = dict.fromkeys(self._layer_of[path] for path in self._parameters)
            for recorded in (self._weights, self._units, self._current, self._last, self._applied, self._pairs, self._norms_at):
                recorded.clear()
            self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def record_gradient_flow(self, layer: str, gradients: Any) -> None:
        """Records one gradient: a tensor, array or list. The same layer again begins a new step, unless you call `step()`. What hooks
        measure already is not recorded again."""
        if not isinstance(layer, str):
            raise SondeError(f"A layer name is a string, not {layer!r} of type {type(layer).__name__}.")
        size = measure_gradient(layer, gradients)
        with self._lock:
            if layer in self._measured_by_hooks:
                return
            self._units.setdefault(layer, UnitActivity()).update(as_tensor(gradients))
            if layer in self._current and not self._steps_counted_by:
                self._end_step()
            self._order.setdefault(layer)
            self._layer_of[layer] = layer
            # After the optimizer's step and before the next backward, gradients are still those of the step that has ended.
            if self._steps_counted_by == BY_OPTIMIZER and not self._current and self._last and layer not in self._last:
                self._last[layer] = size
                self.flow.replace_last_sizes(self._by_layer(self._last))
                return
            self._current[layer] = _GradientWrites(size, size)

    def record_model(self, model: nn.Module) -> None:
        """Records the current `.grad` of all parameters as one step, for use without hooks."""
        with self._lock:
            self._end_step()
            model = require_module(model, "record_model", "For one gradient use record_gradient_flow.")
            self._assign_layers(model)
            for path, parameter in model.named_parameters():
                if parameter.requires_grad and path not in self._measured_by_hooks:
                    self._measure(path, parameter)
            self._end_step()

    def record_norm_at(self, batch_size: float, norm: float) -> None:
        """Records the gradient norm of the whole model at a batch size; ten norms at each of two sizes give the noise scale."""
        _require_positive(batch_size, "batch_size")
        try:
            value = float(norm)  # also of a tensor, as clip_grad_norm_ returns one
        except (TypeError, ValueError, RuntimeError):
            raise SondeError(f"norm must be one number, the gradient norm of the model, not {norm!r}.") from None
        self._norms_at.setdefault(float(batch_size), deque(maxlen=self.flow.max_frames)).append(value)

    def step(self) -> None:
        """Ends the current step. From the first call on, only `step()` ends steps, unless an optimizer was passed."""
        with self._lock:
            self._steps_counted_by = self._steps_counted_by or "a step ends with step()"
            self._end_step()

    def _assign_layers(self, model: nn.Module) -> None:
        owners = dict(model.named_modules())
        for path, parameter in model.named_parameters():
            if parameter.requires_grad:
                module = path.rpartition(".")[0]
                self._layer_of[path] = module or path
                self._order.setdefault(module or path)
                if not isinstance(owners.get(module), (nn.Linear, *CONV)) or isinstance(owners[module], CONV_TRANSPOSE):
                    self._without_units.add(path)

    def _on_gradient_written(self, path: str, parameter: torch.Tensor) -> None:
        self._measure(path, parameter)
        self._measured_by_hooks |= {path, self._layer_of[path]}

    def _measure(self, path: str, parameter: torch.Tensor) -> None:
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
            if path not in self._without_units:
                self._units.setdefault(path, UnitActivity()).update(gradient)
            if known is None:
                self._current[path] = _GradientWrites(size, size, versions=versions)
            else:
                known.last, known.versions, known.num_writes = size, versions, known.num_writes + 1
            if path not in self._weights:
                self._weights[path] = GradientSize.from_statistics(fast_statistics(parameter))

    def _measure_applied_share(self, optimizer: torch.optim.Optimizer) -> None:
        """Compares one gradient with what backward wrote: since then a GradScaler or clip_grad_norm_ multiplied all of them by a factor."""
        of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with self._lock:
            largest, gradient = 0.0, None
            for path, written in self._current.items():
                parameter = self._parameters[path]() if path in self._parameters else None
                if parameter is not None and id(parameter) in of_optimizer and largest < written.last.norm < math.inf:
                    largest, gradient = written.last.norm, parameter.grad
            share = fast_statistics(gradient).l2 / largest if gradient is not None else math.nan
            if 0 < share < math.inf:
                self._applied.append((self._step, share))

    def _end_step(self) -> None:
        with self._lock:
            if not self._current:
                return
            self._last = {path: written.last for path, written in self._current.items()}
            self.flow.record_sizes(self._step, self._by_layer(self._last))
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

    @property
    def has_records(self) -> bool:
        """Whether a step, or a part of one, was recorded by hooks or by hand."""
        return bool(self.flow.frames or self._current)

    def _load(self, run: gradients_of_run.Source) -> "GradientDebugger":
        """Another one with the observed steps of a run. They are not mixed with recorded ones, which are measured before clipping."""
        flow = self.flow
        loaded = GradientDebugger(
            flow.max_frames or MAX_STEPS_OF_RUN, vanishing_threshold=flow.vanishing_threshold, exploding_threshold=flow.exploding_threshold
        )
        recorded = gradients_of_run.read_gradients(run, flow.max_frames or MAX_STEPS_OF_RUN)
        loaded._steps_counted_by = "a step is an observed step of the run"
        loaded._layer_of = {path: path.rpartition(".")[0] or path for path in recorded.paths}
        loaded._order = dict.fromkeys(loaded._layer_of.values())
        loaded._weights = {path: size for path, size in recorded.weights.items() if path in loaded._layer_of}
        for step, sizes in recorded.steps:
            loaded._step = step
            loaded._current = {path: _GradientWrites(size, size) for path, size in sizes.items() if path in loaded._layer_of}
            loaded._end_step()
        return loaded

    def analyze(self) -> GradientReport:
        """Builds the report of the recorded steps, the current one included. Recording continues. Where nothing was recorded, the observed
        steps of the run are analyzed, if there is one."""
        run = self._run() if self._run is not None and not self.has_records else None
        if run is not None:
            return self._load(run).analyze()
        with self._lock:
            flow = GradientFlowAnimator(0, self.flow.vanishing_threshold, self.flow.exploding_threshold)
            if self._current:
                flow.record_sizes(self._step, self._by_layer({path: written.last for path, written in self._current.items()}))
            scales = {layer: size.norm for layer, size in self._by_layer(self._weights).items() if math.isfinite(size.norm)}
            return build_gradient_report(
                [*self.flow.frames, *flow.frames], list(self._order), scales, vanishing_threshold=flow.vanishing_threshold,
                exploding_threshold=flow.exploding_threshold, noise=self._noise_scale(),
                inactive=self._inactive_units(), applied=dict(self._applied),
                steps_counted_by=self._steps_counted_by or "a step begins after cleared gradients or changed parameters",
            )  # fmt: skip

    analyze_gradient_flow = analyze

    def _inactive_units(self) -> dict[str, InactiveUnits]:
        """By layer; of a layer with several weights, those of its last."""
        found = {self._layer_of[path]: activity.inactive() for path, activity in self._units.items() if path in self._layer_of}
        return {layer: units for layer, units in found.items() if units is not None}

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
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise SondeError(f"{name} must be a number of samples above 0, for instance {name}=32, not {value!r}.")
