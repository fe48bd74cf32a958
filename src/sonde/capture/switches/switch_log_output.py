"""What each switch reports of a step, computed from the facts of the step where they are enough."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sonde.capture import process_memory
from sonde.capture.watched_model import join_path
from sonde.events import PlacementChanged
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.find_tensors import find_tensors, memory_by_category, optimizer_state_tensors, shape_of
from sonde.statistics.tensor_statistics_table import measure_columns

if TYPE_CHECKING:
    from sonde.capture.probes.probe import ProbeContext
    from sonde.early_stopper import EarlyStopping

MB = 2**20
MAX_PARAMETERS = 4096  # whose norms are taken one by one

_VALIDATION = ("val_loss", "valid_loss", "validation_loss", "eval_loss", "test_loss")  # how people log what early stopping looks at


class SwitchOutput:
    """What each switch reports of a step that has just ended: a few numbers by name, or None where there is nothing to report."""

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._recorder, self._scalars = context, context.recorder, context.state.scalars
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

    def on_log(self, values: Mapping[str, float]) -> None:
        """The user logged these values."""
        self._logged.update({name: value for name, value in values.items() if name.lower() in _VALIDATION})

    def _memory_usage(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        scalars["rss_mb"] = (process_memory.rss() or math.nan) / MB
        report = {"rss_mb": scalars["rss_mb"], **self.record_memory()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # not tried on a machine with one
            report["cuda_mb"] = scalars["cuda_mb"] = torch.cuda.memory_allocated() / MB
        return report

    def record_memory(self) -> dict[str, float]:
        """Memory by category, into the step's scalars."""
        models = {watched.name: body for watched in self._context.models if (body := watched.body) is not None}
        held = memory_by_category(models, self._context.gradients.optimizers())
        account = {f"{name}_mb": num / MB for name, num in held.items()}
        self._scalars.update(account)
        return account

    def _gradient_norms(self, step: int) -> dict[str, Any]:
        report: dict[str, Any] = {"grad_norm": self._scalars["grad_norm"]}
        named = [(name, p.grad) for name, p in self._parameters() if p.grad is not None and not on_device(p.grad)][:MAX_PARAMETERS]
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
        return {"forwards": int(scalars["forwards"]), "forward_ms": scalars["forward_ms"], "inputs": self._shapes() or "none"}

    def _backward_pass(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        return {"backwards": int(scalars["backwards"]), "backward_ms": scalars["backward_ms"], "loss": scalars["loss"]}

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
            "loss_scale": scalars["loss_scale"], "skipped": int(scalars["skipped_steps"]), "skipped_so_far": self._num_skipped,
            "parameters": _count(_dtype(p) for _, p in self._parameters()),
            "gradients": _count(_dtype(p.grad) for _, p in self._parameters() if p.grad is not None),
            "inputs": _count(_dtype(tensor) for tensor in self._inputs()),
        }  # fmt: skip

    def _data_loading(self, step: int) -> dict[str, Any]:
        scalars = self._scalars
        share = scalars["data_ms"] / scalars["step_ms"] if scalars["step_ms"] else math.nan
        return {"data_ms": scalars["data_ms"], "data_share": share, "inputs": self._shapes() or "none"}

    def _validation(self, step: int) -> dict[str, Any] | None:
        scalars = self._scalars
        if not scalars["eval_forwards"]:
            return None
        return {"eval_forwards": int(scalars["eval_forwards"]), "validation_ms": scalars["validation_ms"]} | self._logged

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
        changed = [name for name, value in rates.items() if self._rates.get(name, value) != value]
        self._rates |= rates
        return {**rates, "scheduler_steps": int(scalars["scheduler_steps"]), "changed": " ".join(changed) or "none"}

    def _parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((join_path(watched.name, name), p) for watched in self._context.models for name, p in watched.parameters())

    def _inputs(self) -> list[torch.Tensor]:
        return [tensor for call in self._context.buffer.calls for _, tensor in find_tensors((call.args, call.kwargs))]

    def _shapes(self) -> str:
        return " ".join(dict.fromkeys("x".join(map(str, shape_of(tensor))) for tensor in self._inputs()))


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
