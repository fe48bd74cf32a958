"""What each switch reports of a step, computed from the facts of the step where they are enough."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from sonde.capture import process_memory
from sonde.capture.probes.learning_rate import learning_rate, scalar_name
from sonde.capture.switches.facts_for_switches import TRAIN
from sonde.capture.watched_model import join_path
from sonde.events import PlacementChanged
from sonde.formatting import listing
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.find_tensors import find_tensors, memory_by_category, optimizer_state_tensors
from sonde.statistics.private_torch_api import is_scheduled
from sonde.statistics.tensor_statistics_table import measure_columns

if TYPE_CHECKING:
    from sonde.capture.probes.probe import ProbeContext
    from sonde.capture.step_inputs_for_replay import ForwardCall
    from sonde.capture.switches.facts_for_switches import StepFacts
    from sonde.early_stopper import EarlyStopping

MB = 2**20
MAX_PARAMETERS = 4096  # whose norms are taken one by one
MAX_NAMES = 8  # inputs, outputs or parameters that one line names
NONE = UNCHANGED = "none"

_VALIDATION = ("val_loss", "valid_loss", "validation_loss", "eval_loss", "test_loss")  # how people log what early stopping looks at


class SwitchOutput:
    """What each switch reports of a step that has just ended: a few numbers by name, or None where there is nothing to report."""

    def __init__(self, context: ProbeContext, facts: StepFacts) -> None:
        self._context, self._recorder, self._scalars = context, context.recorder, context.state.scalars
        self._facts = facts
        self._rates: dict[str, float] = {}
        self._placement: dict[str, Any] = {}
        self._best: tuple[str, float, int] = ("", math.inf, -1)  # of which series, the value, the step
        self._logged: dict[str, float] = {}
        self._num_skipped = 0
        self.early_stopping: EarlyStopping | None = None  # one that the user asked the session for
        self.reports: dict[str, Callable[[int], dict[str, Any] | None]] = {
            "memory_usage": self._memory_usage, "gradient_norms": self._gradient_norms, "forward_pass": self._forward_pass,
            "backward_pass": self._backward_pass, "device_placement": self._device_placement, "mixed_precision": self._mixed_precision,
            "data_loading": self._data_loading, "validation": self._validation, "early_stopping": self._early_stopping,
            "lr_scheduling": self._lr_scheduling,
        }  # fmt: skip
        self.last_reports: dict[str, Callable[[int], dict[str, Any] | None]] = {  # at the end, of what followed the last step
            "validation": self._validation, "lr_scheduling": self._last_rates,
        }  # fmt: skip

    def on_log(self, values: Mapping[str, float]) -> None:
        """The user logged these values."""
        self._logged.update({name: value for name, value in values.items() if name.lower() in _VALIDATION})

    def _memory_usage(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        scalars["rss_mb"] = (process_memory.rss() or math.nan) / MB
        report: dict[str, Any] = {"rss_mb": scalars["rss_mb"], **self.record_memory()}
        available, limit = process_memory.available(), process_memory.limit()
        if available is not None:
            report["system_available_mb"] = available / MB
        if limit is not None:
            report["system_limit_mb"] = limit.num_bytes / MB
        device = "none"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # not tried on a machine with one
            device = f"cuda:{torch.cuda.current_device()}"
            report["cuda_mb"] = scalars["cuda_mb"] = torch.cuda.memory_allocated() / MB
            report["cuda_reserved_mb"], report["cuda_peak_mb"] = torch.cuda.memory_reserved() / MB, torch.cuda.max_memory_allocated() / MB
        elif torch.backends.mps.is_available():
            device, report["mps_mb"] = "mps", torch.mps.current_allocated_memory() / MB
        return report | {"device": device}

    def record_memory(self) -> dict[str, float]:
        """Memory by category, into the step's scalars."""
        models = {watched.name: body for watched in self._context.models if (body := watched.body) is not None}
        held = memory_by_category(models, self._context.gradients.optimizers())
        account = {f"{name}_mb": num / MB for name, num in held.items()}
        self._scalars.update(account)
        return account

    def _gradient_norms(self, step: int) -> dict[str, Any]:
        report: dict[str, Any] = {"grad_norm": self._scalars["grad_norm"]}
        named = self._gradients()
        if named:
            columns = measure_columns([gradient for _, gradient in named])
            norms = columns["l2"]
            largest, smallest = int(norms.argmax()), int(norms.argmin())
            report["largest"], report["smallest"] = (f"{named[i][0]} {norms[i]:.4g}" for i in (largest, smallest))
            report["num_not_finite"] = int((columns["nan"] + columns["inf"] > 0).sum())
            self._recorder.log(step, {"gradient_norms.largest": float(norms[largest]), "gradient_norms.smallest": float(norms[smallest])})
        return report

    def _forward_pass(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        inputs = {name: tensor for call in self._context.buffer.calls for name, tensor in _named_inputs(call)}
        return {
            "forwards": int(scalars["forwards"]), "forward_ms": scalars["forward_ms"],
            "inputs": _shapes({name: tensor.shape for name, tensor in inputs.items()}), "outputs": _shapes(self._facts.outputs),
            "loss": scalars["loss"], "device": " ".join(_count(str(tensor.device) for tensor in inputs.values())) or NONE,
        }  # fmt: skip

    def _backward_pass(self, step: int) -> dict[str, Any]:
        scalars, facts = self._scalars, self._facts
        named = self._gradients()
        columns = measure_columns([gradient for _, gradient in named])
        bad = [name for (name, _), nan, inf in zip(named, columns["nan"], columns["inf"]) if nan + inf > 0]
        update_norm, weight_norm = math.sqrt(facts.update_squares), math.sqrt(facts.weight_squares)
        return {
            "backwards": int(scalars["backwards"]), "backward_ms": scalars["backward_ms"], "loss": scalars["loss"],
            "grad_norm": scalars["grad_norm"], "not_finite": listing(bad, MAX_NAMES) or NONE, "update_norm": update_norm,
            "update_share": update_norm / weight_norm if weight_norm else math.nan,
        }  # fmt: skip

    def _device_placement(self, step: int) -> dict[str, Any]:
        placed: dict[str, Any] = {
            "parameters": _count(str(p.device) for _, p in self._parameters()),
            "inputs": _count(str(tensor.device) for tensor in self._inputs()),
            "optimizer_state": _count(str(tensor.device) for tensor in optimizer_state_tensors(self._context.gradients.optimizers())),
        }
        kinds = {name: sorted(devices) for name, devices in placed.items()}
        if kinds != self._placement:
            self._placement = kinds
            self._recorder.emit(PlacementChanged(**placed), step)
        return {**placed, "transfer_ms": self._scalars["transfer_ms"]}

    def _mixed_precision(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        self._num_skipped += int(scalars["skipped_steps"])
        return {
            "autocast": "on" if self._facts.autocast else "off", "autocast_dtype": self._facts.autocast or NONE,
            "scaler": self._facts.scaler or NONE, "loss_scale": scalars["loss_scale"],
            "skipped": int(scalars["skipped_steps"]), "skipped_so_far": self._num_skipped,
            "parameters": _count(_dtype(p) for _, p in self._parameters()),
            "gradients": _count(_dtype(p.grad) for _, p in self._parameters() if p.grad is not None),
            "inputs": _count(_dtype(tensor) for tensor in self._inputs()),
        }  # fmt: skip

    def _data_loading(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        share = scalars["data_ms"] / scalars["step_ms"] if scalars["step_ms"] else math.nan
        loaders = list(self._facts.loaders.values())
        report: dict[str, Any] = {"dataset": NONE}
        training = next((each for each in reversed(loaders) if each.split == TRAIN), loaders[-1] if loaders else None)
        if training is not None:
            report = {
                "dataset": training.dataset, "num_samples": _or_unknown(training.num_samples),
                "num_batches": _or_unknown(training.num_batches), "batch_size": _or_unknown(training.batch_size),
                "num_workers": training.num_workers,
                "splits": {each.split: _or_unknown(each.num_samples) for each in loaders if each.split},
            }  # fmt: skip
        shapes = " ".join(dict.fromkeys("x".join(map(str, tensor.shape)) for tensor in self._inputs()))
        return report | {"data_ms": scalars["data_ms"], "data_share": share, "inputs": shapes or NONE}

    def _validation(self, step: int) -> dict[str, Any] | None:
        scalars = self._scalars
        if not scalars["eval_forwards"]:
            return None
        return {
            "num_batches": int(scalars["eval_forwards"]), "num_samples": self._facts.num_eval_samples,
            "validation_ms": scalars["validation_ms"], "rss_mb": (process_memory.rss() or math.nan) / MB, **self._logged,
        }  # fmt: skip

    def _early_stopping(self, step: int) -> dict[str, Any] | None:
        if self.early_stopping is not None and self.early_stopping.num_evaluations:
            asked = self.early_stopping
            return {
                "watches": asked.monitor, "best": asked.best, "best_step": asked.best_step, "without_better": asked.num_without,
                "patience": asked.patience, "stops": asked.stopped, "why": asked.why,
            }  # fmt: skip
        name, value = next(iter(self._logged.items()), ("loss", self._scalars["loss"]))
        if math.isnan(value):
            return None
        if name != self._best[0] or value < self._best[1]:
            self._best = (name, value, step)
        self._recorder.log(step, {"early_stopping.steps_since_best": float(step - self._best[2])})
        _, best, best_step = self._best
        return {"watches": name, "value": value, "best": best, "best_step": best_step, "steps_since_best": step - best_step}

    def _lr_scheduling(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        rates = {name: value for name, value in scalars.items() if (name == "lr" or name.startswith("lr:")) and not math.isnan(value)}
        return self._rate_report(rates)

    def _last_rates(self, step: int) -> dict[str, Any] | None:
        """A change after the last update, if there is one."""
        optimizers = self._context.gradients.optimizers()
        rates = {
            scalar_name(place, index): learning_rate(group)
            for place, optimizer in enumerate(optimizers, 1) for index, group in enumerate(optimizer.param_groups, 1)
        }  # fmt: skip
        report = self._rate_report({name: rate for name, rate in rates.items() if name in self._rates and not math.isnan(rate)})
        return None if report["changed"] == UNCHANGED else report

    def _rate_report(self, rates: Mapping[str, float]) -> dict[str, Any]:
        changed = [name for name, rate in rates.items() if self._rates.get(name, rate) != rate]
        changes = [f"{name} from {self._rates[name]:.6g} to {rates[name]:.6g}" for name in changed]
        self._rates |= rates
        is_scheduled_before = any(map(is_scheduled, self._context.gradients.optimizers()))  # by one that was made before the session
        unknown = "one that has not stepped yet" if is_scheduled_before else NONE
        return {
            **rates, "scheduler": listing(list(dict.fromkeys(self._facts.schedulers.values())), MAX_NAMES) or unknown,
            "scheduler_steps": int(self._scalars["scheduler_steps"]), "changed": "; ".join(changes) or UNCHANGED,
        }  # fmt: skip

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, p.grad) for name, p in self._parameters() if p.grad is not None and not on_device(p.grad)][:MAX_PARAMETERS]

    def _parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((join_path(watched.name, name), p) for watched in self._context.models for name, p in watched.parameters())

    def _inputs(self) -> list[torch.Tensor]:
        return [tensor for call in self._context.buffer.calls for _, tensor in find_tensors((call.args, call.kwargs))]


def _named_inputs(call: ForwardCall) -> Iterable[tuple[str, torch.Tensor]]:
    """Inputs by the names of the forward's parameters and of the keys of dicts."""
    names: Sequence[str] = ()
    with suppress(TypeError, ValueError):  # not every callable has a signature
        names = [each.name for each in inspect.signature(call.module.forward).parameters.values() if each.kind is not each.VAR_POSITIONAL]
    for index, value in enumerate(call.args):
        name = names[index] if index < len(names) else str(index)
        for path, tensor in find_tensors(value):
            # The keys of a dict are names already.
            yield (name if isinstance(value, torch.Tensor) else path if isinstance(value, Mapping) else f"{name}.{path}"), tensor
    yield from find_tensors(call.kwargs)


def _shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, str] | str:
    named = {name: "x".join(map(str, shape)) or "scalar" for name, shape in list(shapes.items())[:MAX_NAMES]}
    return named | ({"more": str(len(shapes) - MAX_NAMES)} if len(shapes) > MAX_NAMES else {}) or NONE


def _or_unknown(number: int | None) -> int | str:
    return "unknown" if number is None else number


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
