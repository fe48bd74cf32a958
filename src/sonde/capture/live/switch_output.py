"""What each switch tells of a step that has just ended: a few numbers by name, from what the loop has heard anyway where that is enough."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sonde.capture import process_memory
from sonde.events import STATISTICS
from sonde.incidents.out_of_memory_handler import held_bytes
from sonde.statistics.deferred_reads import on_device
from sonde.statistics.table import StatisticsTable
from sonde.statistics.tensor_utils import find_tensors

if TYPE_CHECKING:
    from sonde.capture.early_stopping import EarlyStopping
    from sonde.capture.recorder import Journal
    from sonde.capture.step_tracker import Loop

MB = 2**20
MAX_PARAMETERS = 4096  # whose norms are taken one by one

_L2, _NAN, _INF = (STATISTICS.index(name) for name in ("l2", "nan", "inf"))
_VALIDATION = ("val_loss", "valid_loss", "validation_loss", "eval_loss", "test_loss")  # how people log what early stopping looks at


class SwitchOutput:
    """One method per switch: the numbers of the step, or None where there is nothing to tell."""

    def __init__(self, loop: Loop, journal: Journal) -> None:
        self._loop, self._journal = loop, journal
        self._rates: dict[str, float] = {}
        self._placed: dict[str, Any] = {}
        self._best: tuple[str, float, int] = ("", math.inf, -1)  # of which series, the value, the step
        self._logged: dict[str, float] = {}
        self._num_skipped = 0
        self.stopping: EarlyStopping | None = None  # one that the user asked the session for

    def logged(self, values: Mapping[str, float]) -> None:
        self._logged.update({name: value for name, value in values.items() if name.lower() in _VALIDATION})

    def __getitem__(self, switch: str) -> Callable[[int], dict[str, Any] | None]:
        teller: Callable[[int], dict[str, Any] | None] = getattr(self, switch)
        return teller

    # -- one per switch ----------------------------------------------------------------------------

    def memory_usage(self, step: int) -> dict[str, Any]:
        scalars = self._journal.scalars
        scalars["rss_mb"] = (process_memory.rss() or math.nan) / MB
        told = {"rss_mb": scalars["rss_mb"], **self.take_account()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # not tried on a machine with one
            told["cuda_mb"] = scalars["cuda_mb"] = torch.cuda.memory_allocated() / MB
        return told

    def take_account(self) -> dict[str, float]:
        """What the memory is taken by, into the step's scalars."""
        models = {watched.name: body for watched in self._loop._models if (body := watched.body) is not None}
        held = held_bytes(models, [each for _, each in self._loop.ledger.optimizers()])
        account = {f"{name}_mb": num / MB for name, num in held.items()}
        self._journal.scalars.update(account)
        return account

    def gradient_norms(self, step: int) -> dict[str, Any]:
        told: dict[str, Any] = {"grad_norm": self._journal.scalars["grad_norm"]}
        named = [(name, p.grad) for name, p in self._parameters() if p.grad is not None and not on_device(p.grad)][:MAX_PARAMETERS]
        if named:
            rows = StatisticsTable(len(named))
            rows.measure(0, [gradient for _, gradient in named])
            rows.synchronize()
            norms = rows.values[:, _L2]
            largest, smallest = int(norms.argmax()), int(norms.argmin())
            told["largest"], told["smallest"] = (f"{named[i][0]} {norms[i]:.4g}" for i in (largest, smallest))
            told["num_not_finite"] = int((rows.values[:, [_NAN, _INF]].sum(axis=1) > 0).sum())
            self._journal.log(step, {"gradient_norms.largest": float(norms[largest]), "gradient_norms.smallest": float(norms[smallest])})
        return told

    def forward_pass(self, step: int) -> dict[str, Any]:
        scalars = self._journal.scalars
        return {"forwards": int(scalars["forwards"]), "forward_ms": scalars["forward_ms"], "inputs": self._shapes() or "none"}

    def backward_pass(self, step: int) -> dict[str, Any]:
        scalars = self._journal.scalars
        return {"backwards": int(scalars["backwards"]), "backward_ms": scalars["backward_ms"], "loss": scalars["loss"]}

    def device_placement(self, step: int) -> dict[str, Any]:
        states = [value for _, each in self._loop.ledger.optimizers() for state in each.state.values() for _, value in find_tensors(state)]
        placed = {
            "parameters": _counted(str(p.device) for _, p in self._parameters()),
            "inputs": _counted(str(tensor.device) for tensor in self._inputs()),
            "optimizer_state": _counted(str(tensor.device) for tensor in states),
        }
        kinds = {name: sorted(devices) for name, devices in placed.items()}
        if kinds != self._placed:
            self._placed = kinds
            self._journal.event("placement", step, **placed)
        return {**placed, "transfer_ms": self._journal.scalars["transfer_ms"]}

    def mixed_precision(self, step: int) -> dict[str, Any]:
        scalars = self._journal.scalars
        self._num_skipped += int(scalars["skipped_steps"])
        return {
            "loss_scale": scalars["loss_scale"], "skipped": int(scalars["skipped_steps"]), "skipped_so_far": self._num_skipped,
            "parameters": _counted(_dtype(p) for _, p in self._parameters()),
            "gradients": _counted(_dtype(p.grad) for _, p in self._parameters() if p.grad is not None),
            "inputs": _counted(_dtype(tensor) for tensor in self._inputs()),
        }  # fmt: skip

    def data_loading(self, step: int) -> dict[str, Any]:
        scalars = self._journal.scalars
        share = scalars["data_ms"] / scalars["step_ms"] if scalars["step_ms"] else math.nan
        return {"data_ms": scalars["data_ms"], "data_share": share, "inputs": self._shapes() or "none"}

    def validation(self, step: int) -> dict[str, Any] | None:
        scalars = self._journal.scalars
        if not scalars["eval_forwards"]:
            return None
        return {"eval_forwards": int(scalars["eval_forwards"]), "validation_ms": scalars["validation_ms"]} | self._logged

    def early_stopping(self, step: int) -> dict[str, Any] | None:
        if self.stopping is not None and self.stopping.num_evaluations:
            asked = self.stopping
            return {
                "watches": asked.monitor, "best": asked.best, "best_step": asked.best_step, "without_better": asked.num_without,
                "patience": asked.patience, "stops": asked.stopped, "why": asked.why,
            }  # fmt: skip
        name, value = next(iter(self._logged.items()), ("loss", self._journal.scalars["loss"]))
        if math.isnan(value):
            return None
        if name != self._best[0] or value < self._best[1]:
            self._best = (name, value, step)
        self._journal.log(step, {"early_stopping.steps_since_best": float(step - self._best[2])})
        _, best, best_step = self._best
        return {"watches": name, "value": value, "best": best, "best_step": best_step, "steps_since_best": step - best_step}

    def lr_scheduling(self, step: int) -> dict[str, Any]:
        scalars = self._journal.scalars
        rates = {name: value for name, value in scalars.items() if (name == "lr" or name.startswith("lr:")) and not math.isnan(value)}
        changed = [name for name, value in rates.items() if self._rates.get(name, value) != value]
        self._rates |= rates
        return {**rates, "scheduler_steps": int(scalars["scheduler_steps"]), "changed": " ".join(changed) or "none"}

    # -- what they share ---------------------------------------------------------------------------

    def _parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        for watched in self._loop._models:
            for name, parameter in watched.parameters():
                yield f"{watched.name}.{name}" if watched.name else name, parameter

    def _inputs(self) -> list[torch.Tensor]:
        return [tensor for call in self._loop.kept.calls for _, tensor in find_tensors((call.args, call.kwargs))]

    def _shapes(self) -> str:
        return " ".join(dict.fromkeys("x".join(map(str, tensor.shape)) for tensor in self._inputs()))


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
