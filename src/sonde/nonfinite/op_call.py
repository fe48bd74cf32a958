"""One operation under way: what it is given, by the names of its arguments, and what of that it will write over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from sonde.nonfinite.module_stack import storage_of

_RUNNING = frozenset({"running_mean", "running_var"})


@dataclass(slots=True, eq=False)
class Node:
    """An operation of the forward, and where it stands: what a node of autograd will be asked for in backward."""

    number: int  # of the node in autograd
    arithmetic: str  # "nll_loss_forward"
    known_as: str  # "cross_entropy"
    module: str
    source: str
    text: str
    is_hooked: bool  # what it saved for backward is in the hands of hooks (checkpointing): asking for it would run the forward again
    parameters: tuple[int, ...] = ()  # storages of the parameters that it was given
    after: tuple[str, ...] = ()  # modules whose operations made what it was given, the nearest first
    is_hidden: bool = False  # a where() or a mask chose among results that follow from it


class Call:
    """What an operation is given."""

    __slots__ = ("_originals", "autograd_node", "func", "in_backward", "is_accumulation", "numbers", "tensors", "was_finite", "written")

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.in_backward = False
        self.is_accumulation = False  # a gradient becomes .grad
        self.autograd_node: Any = None  # whose backward is under way
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, Any] = {}
        self.written: set[str] = set()
        self.was_finite: dict[str, bool] = {}
        self._originals: dict[str, Tensor] = {}
        arguments = _arguments(func)
        for (name, is_written), value in zip(arguments, args):
            self._take(name, value, is_written)
        by_name = dict(arguments)
        for name, value in kwargs.items():
            self._take(name, value, by_name.get(name, False))

    def _take(self, name: str, value: Any, is_written: bool) -> None:
        if isinstance(value, Tensor):
            self.tensors[name] = value
            if is_written:
                self.written.add(name)
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            for i, item in enumerate(value):
                self._take(f"{name}[{i}]", item, is_written)
        else:
            self.numbers[name] = value

    @property
    def floating(self) -> Iterator[tuple[str, Tensor]]:
        """Those that its result may follow from."""
        # In training a batch norm writes its running statistics and reads them for nothing else: the forward that ran before has written
        # the bad number of this batch there already.
        aside = _RUNNING if self.numbers.get("training") or self.numbers.get("train") else ()
        return ((name, tensor) for name, tensor in self.tensors.items() if is_floating(tensor) and name not in aside)

    @property
    def bad_literals(self) -> list[float]:
        """Numbers written in the program that are not finite: masked_fill(mask, -inf)."""
        return [number for number in self.numbers.values() if isinstance(number, float) and not math.isfinite(number)]

    def keep_what_is_written(self, limit_bytes: int) -> None:
        """Copy, within limits, what the operation is about to write over."""
        left = limit_bytes
        for name in self.written:
            tensor = self.tensors[name]
            if is_floating(tensor) and tensor.nbytes <= left:
                left -= tensor.nbytes
                self._originals[name] = tensor
                self.tensors[name] = tensor.detach().clone()

    def original(self, name: str) -> Tensor:
        """The tensor itself, where a copy stands for it."""
        return self._originals.get(name, self.tensors[name])

    def writes_into_a_parameter(self) -> bool:
        return any(isinstance(self.original(name), torch.nn.Parameter) for name in self.written)

    def is_log_of_a_mask(self) -> bool:
        """log(mask) is a way to write -Inf on purpose: the mask is 0 here and 1 everywhere else, and nothing that is learnt."""
        if not self.func._schema.name.startswith("aten::log") or "input" not in self.tensors:
            return False
        mask = self.tensors["input"]
        return not self.original("input").requires_grad and bool((mask == 1).any()) and bool(((mask == 0) | (mask == 1)).all())


def is_floating(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def is_mask(tensor: Tensor) -> bool:
    """An additive mask: -Inf here, 0 everywhere else."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all()) if tensor.dtype.is_floating_point else False


def saved_tensors(call: Call, node: Node | None) -> dict[str, Tensor]:
    """What the forward operation saved for the backward that is under way, by name."""
    if call.autograd_node is None or node is None or node.is_hooked:
        return {}
    found = {}
    for name in dir(call.autograd_node):
        if name.startswith("_saved_"):
            value = getattr(call.autograd_node, name)
            if isinstance(value, Tensor):
                found[f"saved {name.removeprefix('_saved_')}"] = value.detach()
    return found


def places_of(tensors: Mapping[str, Tensor], held: Mapping[int, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Which of these tensors a model holds: ("parameter", path) or ("buffer", path)."""
    return {name: held[storage] for name, tensor in tensors.items() if (storage := storage_of(tensor)) in held}


@cache
def _arguments(func: OpOverload) -> list[tuple[str, bool]]:
    """Names, and whether the operation writes into them. torch calls the first `self`, its documentation `input`."""
    return [
        ("input" if argument.name == "self" else argument.name, bool(argument.alias_info and argument.alias_info.is_write))
        for argument in func._schema.arguments
    ]
