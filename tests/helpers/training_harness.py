"""Runs a training, watched or bare, and says what came of it: losses, a hash of every number it holds, the state of all generators."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import sonde
from model_examples import Program
from sonde.capture import step_tracker
from sonde.capture.probes import activations

HELPERS = Path(__file__).parent
SEED = 7
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Observe = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]

OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
}


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)  # after attaching, after every step and after detaching
    state: str = ""


def seed() -> None:
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


def generators() -> str:
    """One hash of the three generators that a training may use."""
    parts = (torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), repr(random.getstate()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def digest(*values: Any) -> str:
    """SHA-256 over everything in these: tensors by their bytes, the rest by its text."""
    sha = hashlib.sha256()
    for value in values:
        _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, Mapping):
        for key in value:
            sha.update(repr(key).encode())
            _feed(sha, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(sha, item)
    else:
        sha.update(repr(value).encode())


def bare(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def watched(path: Path, *, every: int | None = 1, strict: bool = True) -> Observe:
    """Watches into a new run of its own under `path`."""

    def observe(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return sonde.watch(model, optimizer, to=new_path(path), every=every, strict=strict)

    return observe


def new_path(parent: Path) -> Path:
    return parent / f"run{sum(1 for _ in parent.iterdir()) if parent.exists() else 0}"


def train(
    program: Program,
    optimizer: Optimizers = OPTIMIZERS["SGD"],
    observe: Observe = bare,
    *,
    steps: int = 4,
    bf16: bool = False,
    backend: str | None = None,
) -> Outcome:
    """Trains from the same seed, whatever happened before."""
    seed()
    outcome = Outcome()
    model = program.build()
    chosen = optimizer(model)
    called = torch.compile(model, backend=backend) if backend else model
    with observe(called, chosen):
        outcome.generators.append(generators())
        for _ in range(steps):
            chosen.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = program.loss(called)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            chosen.step()
            outcome.losses.append(loss.item())
            outcome.generators.append(generators())
    outcome.generators.append(generators())
    outcome.state = digest(model.state_dict(), chosen.state_dict(), [p.grad for p in model.parameters()])
    return outcome


def process_state() -> dict[str, Any]:
    """What a library might leave changed behind it."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "python threads": threading.active_count(),
        "warnings": list(warnings.filters),
        "root logger": (logging.root.level, list(logging.root.handlers)),
        "our logger": (logging.getLogger("sonde").level, list(logging.getLogger("sonde").handlers)),
        "interpreter": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile(), sys.displayhook),
        "streams": (sys.stdout, sys.stderr),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "numpy": np.geterr(),
        "recursion": sys.getrecursionlimit(),
        "print options": repr(torch._tensor_str.PRINT_OPTS),
    }


@contextlib.contextmanager
def visible_to_modes() -> Iterator[None]:
    """Inside, modes of torch see what Sonde does while it observes, which is hidden from them otherwise: for tests that count it."""
    names = ("num_function_modes", "num_dispatch_modes")
    places = [(module, name, getattr(module, name)) for module in (step_tracker, activations) for name in names]
    for module, name, _ in places:
        setattr(module, name, int)  # int() is 0: there are no modes to leave
    try:
        yield
    finally:
        for module, name, before in places:
            setattr(module, name, before)


def hook_counts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """The number of hooks in every place where torch keeps some."""
    counts = []
    for module in model.modules():
        for name, value in vars(module).items():
            if "hooks" in name and isinstance(value, dict):
                counts.append(len(value))
    for p in model.parameters():
        counts += [len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())]
    counts += [len(value) for name, value in vars(optimizer).items() if "hooks" in name]
    return counts


def one_step(program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = program.loss(model)
    loss.backward()
    optimizer.step()
    return loss.item()


def patched_functions() -> dict[str, Any]:
    """What the switchboard replaces while somebody listens."""
    return {
        "backward": torch.autograd.backward,
        "Optimizer.__init__": torch.optim.Optimizer.__init__,
        "Optimizer.zero_grad": torch.optim.Optimizer.zero_grad,
        "Module.zero_grad": nn.Module.zero_grad,
        "Module.__call__": nn.Module.__call__,
        "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
        "StepLR.step": torch.optim.lr_scheduler.StepLR.step,
        "GradScaler": (torch.amp.GradScaler.scale, torch.amp.GradScaler.step),
        "compile": (torch.compile, nn.Module.compile),
        "loader": (torch.utils.data.dataloader._BaseDataLoaderIter.__next__, torch.utils.data.DataLoader.__iter__),
        "save": (torch.save, torch.serialization.save),
        "tensor": [torch.Tensor.__dict__.get(name) for name in ("item", "tolist", "cpu", "numpy", "to", "__bool__", "__repr__")],
        "trace": sys.gettrace(),
        "global hooks": [len(hooks) for hooks in (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)],
        "optimizer hooks": (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)),
    }


@contextlib.contextmanager
def setting(change: Callable[[], None], undo: Callable[[], None]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        undo()


# -- processes -------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """For a child that must find Sonde, the helpers and the packages in tests/ from any directory."""
    path = os.pathsep.join(map(str, (Path(sonde.__file__).parents[1], HELPERS, HELPERS.parent)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SONDE_")}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | more


def python(
    code: str, folder: Path, *arguments: str, name: str = "train.py", timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program written as a script, bare."""
    return call(write(code, folder, name), *arguments, folder=folder, timeout=timeout, **variables)


def sonde_run(
    code: str, folder: Path, *arguments: str, options: tuple[str, ...] = ("--strict", "--quiet", "--to", "run"), name: str = "train.py",
    timeout: float = 120, **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs a program written as a script under `sonde run`."""
    return call("-m", "sonde", "run", *options, write(code, folder, name), *arguments, folder=folder, timeout=timeout, **variables)


def write(code: str, folder: Path, name: str = "train.py") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(code), encoding="utf-8")
    return name


def call(*command: str, folder: Path, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a folder."""
    started = {"cwd": folder, "env": environment(**variables), "timeout": timeout}
    return subprocess.run([sys.executable, *command], capture_output=True, encoding="utf-8", check=False, **started)
