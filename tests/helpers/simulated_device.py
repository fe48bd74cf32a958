"""A device that is written in Python, for machines that have none: tensors on it are real and compute, in the memory of the CPU, but only
what is brought over can be used beside them.

torch can be told of one such backend, and not be told to forget it: each user of it needs a process of its own. Called as a program, it
runs others under Sonde, with a close look at every third step:  python simulated_device.py DIRECTORY PROGRAM …  (`-`: without Sonde)
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

NAME = "simulated"
MOVES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class SimulatedTensor(torch.Tensor):
    """Says that it is on the device, and holds one that is not."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> SimulatedTensor:
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=torch.device(NAME, 0)
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on {NAME}"


class SimulatedDevice(TorchDispatchMode):
    """While it is on, tensors can be made there and brought there."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


def _is_on_cpu(one: object) -> bool:
    """A tensor of the CPU that is more than a number, which may go along."""
    return isinstance(one, torch.Tensor) and not isinstance(one, SimulatedTensor) and one.dim() > 0


def _compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    wanted = kwargs.get("device")
    on_device = tree_any(lambda one: isinstance(one, SimulatedTensor), (args, kwargs))
    if on_device and operation not in MOVES and tree_any(_is_on_cpu, (args, kwargs)):
        raise RuntimeError(f"{operation}: expected all tensors to be on the same device, but some are on {NAME} and some on the CPU")
    if wanted is not None:
        on_device = torch.device(wanted).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    cpu_args, cpu_kwargs = tree_map_only(SimulatedTensor, lambda one: one.held, (args, kwargs))
    result = operation(*cpu_args, **cpu_kwargs)
    if operation._schema.is_mutable:
        return args[0] if isinstance(args[0], torch.Tensor) else None
    return tree_map_only(torch.Tensor, SimulatedTensor, result) if on_device else result


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    copy = tensor.clone()
    copy.lies_pinned = True  # type: ignore[attr-defined]
    return copy


def install() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    # Nor is there memory that could be pinned for it.
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[assignment,method-assign]
    torch.Tensor.is_pinned = lambda tensor, device=None: hasattr(tensor, "lies_pinned")  # type: ignore[assignment,method-assign]


def main(directory: str, programs: list[str]) -> None:
    install()
    from sonde.capture.step_profiler import device_transfers
    from sonde.config import load_config
    from sonde.session import run_script
    from training_harness import visible_to_modes

    device_transfers.PINS = (NAME,)
    config = load_config(mode="performance_profiling", performance_profiling_frequency=3)
    for program in programs:
        with visible_to_modes(), SimulatedDevice():
            if directory == "-":
                runpy.run_path(program, run_name="__main__")
                continue
            to = "/".join((directory, *Path(program).with_suffix("").parts[-2:]))
            launched = run_script(program, (), module=False, config=config, to=to, name=None, strict=True)
            assert launched.exit_code == 0, program


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
