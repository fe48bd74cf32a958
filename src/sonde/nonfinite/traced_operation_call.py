"""The call of one operation: its arguments by name, and which of them it writes in place."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sonde.nonfinite.module_stack import Location, storage_id
from sonde.statistics.private_torch_api import OpOverload, op_schema, saved_value, saved_value_names

_RUNNING_STATISTICS = frozenset({"running_mean", "running_var"})


@dataclass(slots=True, eq=False)
class AutogradNodeInfo:
    """The forward operation that created an autograd node, and where the program called it; looked up again in backward."""

    sequence_nr: int  # of the autograd node
    base_name: str  # "nll_loss_forward"
    location: Location  # its operation is "cross_entropy"
    has_saved_tensor_hooks: bool  # hooks (checkpointing) hold its saved tensors: reading them would run the forward again
    parameters: tuple[int, ...] = ()  # storages of the parameters among its arguments
    producer_modules: tuple[str, ...] = ()  # modules whose operations produced its arguments, nearest first
    is_masked: bool = False  # a where() or a mask selects among results that follow from it


class OpCall:
    """The arguments of one operation, as they are before it runs."""

    __slots__ = (
        "_originals", "autograd_node", "func", "in_backward", "is_accumulate_grad", "other_args", "tensors", "was_finite", "written_args",
    )  # fmt: skip

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.in_backward = False
        self.is_accumulate_grad = False  # a gradient is added to .grad
        self.autograd_node: Any = None  # the node whose backward is running
        self.tensors: dict[str, Tensor] = {}
        self.other_args: dict[str, Any] = {}
        self.written_args: set[str] = set()
        self.was_finite: dict[str, bool] = {}
        self._originals: dict[str, Tensor] = {}
        is_written = _arguments(func)
        for name, value in (*zip(is_written, args), *kwargs.items()):
            self._add_argument(name, value, is_written.get(name, False))

    def _add_argument(self, name: str, value: Any, is_written: bool) -> None:
        if isinstance(value, Tensor):
            self.tensors[name] = value
            if is_written:
                self.written_args.add(name)
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            for i, item in enumerate(value):
                self._add_argument(f"{name}[{i}]", item, is_written)
        else:
            self.other_args[name] = value

    @property
    def float_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the floating-point arguments that the result may depend on."""
        # In training, a batch norm writes its running statistics and does not use them for its output. When a step is replayed,
        # the first run has already written the bad value of this batch there, so they must not count as an input.
        excluded = _RUNNING_STATISTICS if self.other_args.get("training") or self.other_args.get("train") else ()
        return ((name, tensor) for name, tensor in self.tensors.items() if is_floating(tensor) and name not in excluded)

    @property
    def nonfinite_literals(self) -> list[float]:
        """Non-finite numbers among the arguments: masked_fill(mask, -inf)."""
        return [number for number in self.other_args.values() if isinstance(number, float) and not math.isfinite(number)]

    def copy_written_args(self, limit_bytes: int) -> None:
        """Copy the tensors that the operation is about to overwrite, up to `limit_bytes`."""
        left = limit_bytes
        for name in self.written_args:
            tensor = self.tensors[name]
            if is_floating(tensor) and tensor.nbytes <= left:
                left -= tensor.nbytes
                self._originals[name] = tensor
                self.tensors[name] = tensor.detach().clone()

    def original(self, name: str) -> Tensor:
        """The argument itself, also if `tensors` holds a copy of it."""
        return self._originals.get(name, self.tensors[name])

    def writes_to_parameter(self) -> bool:
        return any(isinstance(self.original(name), torch.nn.Parameter) for name in self.written_args)

    def is_log_of_mask(self) -> bool:
        """Whether this is log(mask), a way to write -Inf on purpose: the argument is 0 or 1 everywhere and needs no gradient."""
        if not op_schema(self.func).name.startswith("aten::log") or "input" not in self.tensors:
            return False
        mask = self.tensors["input"]
        return not self.original("input").requires_grad and bool((mask == 1).any()) and bool(((mask == 0) | (mask == 1)).all())


def is_floating(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def is_additive_mask(tensor: Tensor) -> bool:
    """Whether every element is -Inf or 0."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all()) if tensor.dtype.is_floating_point else False


def saved_tensors(call: OpCall, node: AutogradNodeInfo | None) -> dict[str, Tensor]:
    """The tensors that the forward saved for the running backward, as `saved <name>`."""
    if call.autograd_node is None or node is None or node.has_saved_tensor_hooks:
        return {}
    saved = {name: saved_value(call.autograd_node, name) for name in saved_value_names(call.autograd_node)}
    return {f"saved {name}": value.detach() for name, value in saved.items() if isinstance(value, Tensor)}


def select_model_tensors(tensors: Mapping[str, Tensor], model_tensors: Mapping[int, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Those of `tensors` that belong to a model, as ("parameter", path) or ("buffer", path). `model_tensors`: the same by storage."""
    return {name: model_tensors[storage] for name, tensor in tensors.items() if (storage := storage_id(tensor)) in model_tensors}


@cache
def _arguments(func: OpOverload) -> dict[str, bool]:
    """By name of an argument, whether the operation writes it. The schema names the first `self`, the documentation `input`."""
    arguments = op_schema(func).arguments
    return {"input" if one.name == "self" else one.name: bool(one.alias_info and one.alias_info.is_write) for one in arguments}
