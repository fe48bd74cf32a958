"""What switches report of a step and no probe measures: outputs, autocast, evaluations, sizes of updates, loaders, schedulers.

It is collected only while a switch that needs it is on; loaders and schedulers, which start rarely, are remembered always.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Subset

from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.events import STATISTICS
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.parameter_snapshot import ParameterSnapshot
from sonde.statistics.private_torch_api import has_map_dataset
from sonde.statistics.tensor_statistics_table import StatisticsTable

if TYPE_CHECKING:
    from sonde.capture.switches.debug_switches import Switches

NEEDED_BY = frozenset({"forward_pass", "backward_pass", "mixed_precision", "data_loading", "validation", "lr_scheduling"})
MAX_LOADERS = 8  # that are remembered, the last ones
MAX_SCHEDULERS = 8
TRAIN, VALIDATION = "train", "validation"
_L2 = STATISTICS.index("l2")


@dataclass(slots=True)
class LoaderFacts:
    """A DataLoader that was started."""

    loader: weakref.ref[Any]
    split: str = ""  # whether a training or an evaluation used it first; "" if neither has yet
    dataset: str = ""
    num_samples: int | None = None
    num_batches: int | None = None
    batch_size: int | None = None
    num_workers: int = 0


@dataclass(slots=True)
class StepFacts:
    """Facts of the step under way, and of what lasts longer."""

    outputs: dict[str, torch.Size] = field(default_factory=dict)  # shapes by path
    autocast: str = ""  # its dtype, in the last forward; "" where it was off
    scaler: str = ""  # class of the GradScaler
    num_eval_samples: int = 0
    update_squares: float = math.nan  # sum of squares over all parameters; NaN where no update was measured
    weight_squares: float = math.nan
    loaders: dict[int, LoaderFacts] = field(default_factory=dict)  # by id, the last started one last
    schedulers: dict[int, str] = field(default_factory=dict)  # classes by id

    def end_step(self) -> None:
        self.outputs.clear()
        self.num_eval_samples = 0
        self.update_squares = self.weight_squares = math.nan

    def on_loader_start(self, loader: Any) -> None:
        known = self.loaders.pop(id(loader), None)
        self.loaders[id(loader)] = known if known is not None and known.loader() is loader else _describe_loader(loader)
        if len(self.loaders) > MAX_LOADERS:
            del self.loaders[next(iter(self.loaders))]

    def on_scheduler(self, scheduler: Any) -> None:
        if len(self.schedulers) < MAX_SCHEDULERS:
            self.schedulers[id(scheduler)] = type(scheduler).__name__

    def use_loader(self, split: str) -> None:
        """The loader that was started last serves a training or an evaluation."""
        last = next(reversed(self.loaders.values()), None)
        if last is not None and not last.split:
            last.split = split


class SwitchFactsProbe(Probe):
    """Collects `StepFacts` while a switch that needs them is on."""

    name = "facts_for_switches"

    def __init__(self, context: ProbeContext, switches: Switches) -> None:
        super().__init__(context)
        self._switches, self._facts = switches, switches.facts
        self._snapshots: dict[int, tuple[ParameterSnapshot, StatisticsTable]] = {}  # by id(optimizer)

    @property
    def is_enabled(self) -> bool:
        return not NEEDED_BY.isdisjoint(self._switches.names_on)

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        device = next((p.device.type for p in module.parameters()), "cpu")
        is_on = torch.is_autocast_enabled(device)
        self._facts.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if is_on else ""
        self._facts.use_loader(TRAIN)

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        named = [("output", output)] if isinstance(output, torch.Tensor) else find_tensors(output)
        self._facts.outputs |= {path: tensor.shape for path, tensor in named}

    def on_eval_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            return  # a training in eval mode
        self._facts.use_loader(VALIDATION)
        for _, tensor in find_tensors((args, kwargs))[:1]:
            self._facts.num_eval_samples += tensor.shape[0] if tensor.dim() else 1

    def on_loss_scaled(self, scaler: Any) -> None:
        self._facts.scaler = f"{type(scaler).__name__}{'' if scaler.is_enabled() else ' (disabled)'}"

    def on_scheduler_step(self, scheduler: Any, has_argument: bool) -> None:
        self._facts.on_scheduler(scheduler)

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if "backward_pass" not in self._switches.names_on:
            self._snapshots.clear()
            return
        parameters = optimizer_parameters(optimizer)
        known = self._snapshots.get(id(optimizer))
        if known is None or len(known[1].values) != len(parameters):
            limit_bytes = self._context.config.max_update_memory_mb * 2**20
            known = self._snapshots[id(optimizer)] = (ParameterSnapshot(limit_bytes), StatisticsTable(len(parameters)))
        known[0].take(parameters, known[1], 0)
        self._facts.weight_squares = _add(self._facts.weight_squares, known[1])

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        snapshot, table = self._snapshots.get(id(optimizer), (None, None))
        if snapshot is not None and table is not None and snapshot.available:
            snapshot.diff(optimizer_parameters(optimizer), table, 0)
            self._facts.update_squares = _add(self._facts.update_squares, table)

    def on_detach(self) -> None:
        self._snapshots.clear()


def _add(squares: float, table: StatisticsTable) -> float:
    table.synchronize()
    total = float((table.values[:, _L2] ** 2).sum())
    return total if math.isnan(squares) else squares + total


def _describe_loader(loader: Any) -> LoaderFacts:
    """What can be read of it: subclasses of the user may behave in any way."""
    facts = LoaderFacts(weakref.ref(loader))
    with contextlib.suppress(Exception):
        dataset = loader.dataset
        facts.dataset, facts.num_workers, facts.batch_size = type(dataset).__name__, int(loader.num_workers), loader.batch_size
        if isinstance(dataset, Subset):
            facts.dataset = f"{facts.dataset} of {type(dataset.dataset).__name__}"
        if has_map_dataset(loader):
            facts.num_samples, facts.num_batches = len(dataset), len(loader)
    return facts
