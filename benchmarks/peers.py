"""Other tools, each used as its own documentation shows, so that Sonde's cost can be compared with theirs.

A peer is imported only when its turn comes: importing it would change the process that the others run in.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import Training


class Watcher:
    """Watches a training during its turns. This one does nothing: it is the bare training."""

    def begin(self) -> None:
        """Its turn starts."""

    def flush(self) -> None:
        """Deferred work, which is timed with the turn."""

    def end(self) -> None:
        """Its turn is over: from here on it may cost nothing."""

    def close(self) -> None: ...


class DetectAnomaly(Watcher):
    def __init__(self, training: Training, scratch: Path) -> None:
        self._mode = contextlib.ExitStack()

    def begin(self) -> None:
        self._mode.enter_context(torch.autograd.set_detect_anomaly(True))

    def end(self) -> None:
        self._mode.close()


class TensorBoardHistograms(Watcher):
    """`add_histogram` for every weight, gradient and activation, at every step."""

    def __init__(self, training: Training, scratch: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._model, self._outputs = training.model, dict[str, torch.Tensor]()
        self._writer = SummaryWriter(str(scratch / "tensorboard"))
        for name, module in training.model.named_modules():
            if not module._modules:
                module.register_forward_hook(self._keep(name))
        training.before_update = self._write

    def _keep(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[name] = output.detach()

        return hook

    def _write(self, step: int) -> None:
        for name, parameter in self._model.named_parameters():
            self._writer.add_histogram(f"weights/{name}", parameter, step)
            self._writer.add_histogram(f"gradients/{name}", parameter.grad, step)
        for name, output in self._outputs.items():
            self._writer.add_histogram(f"activations/{name}", output, step)
        self._outputs.clear()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWatch(Watcher):
    """`wandb.watch(model, log="all", log_freq=1)`: gradients and parameters. What its service process does is not counted."""

    def __init__(self, training: Training, scratch: Path) -> None:
        os.environ |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_ERROR_REPORTING": "false"}
        import wandb

        self._run = wandb.init(mode="offline", dir=str(scratch), project="overhead")
        self._run.watch(training.model, log="all", log_freq=1)
        training.before_update = lambda step: self._run.log({"step": step})

    def close(self) -> None:
        self._run.finish()


class UnderflowOverflow(Watcher):
    """Hugging Face's hooks on all modules: absolute minimum and maximum of parameters, inputs and outputs."""

    def __init__(self, training: Training, scratch: Path) -> None:
        from transformers.debug_utils import DebugUnderflowOverflow

        self._hooks = DebugUnderflowOverflow(training.model)


class Profiler(Watcher):
    """`torch.profiler.profile` on the CPU over the whole turn; turning its events into Python's is left out."""

    def __init__(self, training: Training, scratch: Path) -> None:
        self._profile: torch.profiler.profile | None = None

    def begin(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.start()

    def flush(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


class OneSum(Watcher):
    """Nobody's tool: `torch.sum` of each tensor whose statistics Sonde takes, and a copy of the weights, which an update needs. No observer
    that reads every number once can cost less than about this, so it says what a budget can mean on this machine."""

    def __init__(self, training: Training, scratch: Path) -> None:
        self._training, self._handles = training, list[Any]()
        self._weights = [parameter.detach() for parameter in training.model.parameters()]
        self._copies = [weight.clone() for weight in self._weights]

    def begin(self) -> None:
        leaves = [module for module in self._training.model.modules() if not module._modules]
        self._handles = [leaf.register_forward_hook(self._output) for leaf in leaves]
        self._training.before_update = self._update

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._training.before_update = None

    @staticmethod
    def _output(module: nn.Module, args: Any, output: Any) -> None:
        torch.sum(output.detach())
        if output.requires_grad:
            output.register_hook(_sum)

    def _update(self, step: int) -> None:
        for parameter, weight, copy in zip(self._training.model.parameters(), self._weights, self._copies):
            torch.sum(copy)  # an update is read from both
            torch.sum(copy.copy_(weight))
            if parameter.grad is not None:
                torch.sum(parameter.grad)


def _sum(gradient: torch.Tensor) -> None:
    torch.sum(gradient)


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    make: Callable[[Training, Path], Watcher]
    needs: str = ""  # the package that must be there

    @property
    def is_installed(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None


PEERS = (
    Peer("one torch.sum of each tensor", OneSum),
    Peer("torch.autograd.detect_anomaly", DetectAnomaly),
    Peer("torch.profiler", Profiler),
    Peer("TensorBoard histograms", TensorBoardHistograms, "tensorboard"),
    Peer("wandb.watch", WandbWatch, "wandb"),
    Peer("HF DebugUnderflowOverflow", UnderflowOverflow, "transformers"),
)
