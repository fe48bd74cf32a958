"""Converts nested values (inputs of a model, optimizer state) to strict JSON that refers to tensors by name, and back.

Lists, strings, integers, floats, booleans and None are plain JSON. Any other value is an object with one key, its kind:
`{"tensor": "args.0"}`, `{"tuple": […]}`, `{"dict": [[key, value], …]}`, `{"float": "nan"}`, `{"left_out": "a function"}`.
Reading executes nothing.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from sonde.statistics.private_torch_api import is_traceable_wrapper_subclass

MAX_DEPTH = 32
MAX_LEAVES = 200_000  # values in one capsule; the optimizer state of a large model has some ten thousand
MAX_INT = 2**63
MAX_NAME = 200  # characters of a tensor's name; a longer one is replaced by a number

STORABLE_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    }
)  # fmt: skip


class DamagedError(ValueError):
    """The content of a capsule is invalid."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Replaces a value that was not stored."""

    reason: str


class Packer:
    """Converts values to JSON and collects their tensors by name: the tensors themselves, detached, not copies."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.left_out: list[str] = []  # "args.1: a function"
        self._names: dict[int, str] = {}  # by id of the tensor: one that is passed twice is stored once
        self._num_leaves = 0

    def pack(self, value: Any, path: str, depth: int = 0) -> Any:
        """`value` as JSON. `path` ("args.0") names it in messages, and names its tensors."""
        self._num_leaves += 1
        if self._num_leaves > MAX_LEAVES:
            return self._leave_out(path, f"more than {MAX_LEAVES:,} values")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)  # a string Enum becomes its string
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        if isinstance(value, np.generic):
            return self.pack(value.item(), path, depth)
        if isinstance(value, (int, float, complex)):
            return self._number(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if depth >= MAX_DEPTH:
            return self._leave_out(path, f"nested deeper than {MAX_DEPTH}")
        return self._container(value, path, depth + 1)

    def tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        """A tensor as JSON; its values go to `tensors`."""
        reason = reason_not_storable(tensor)
        if reason:
            return self._leave_out(path, reason)
        name = self._names.get(id(tensor))
        if name is None:
            name = self._names[id(tensor)] = _tensor_name(path, len(self.tensors))
            self.tensors[name] = tensor.detach()
            if tensor.grad_fn is not None:
                self.left_out.append(f"{path}: its autograd graph; its values are stored")
        packed: dict[str, Any] = {"tensor": name}
        if tensor.requires_grad:
            packed["requires_grad"] = True
        if tensor.is_complex():
            packed["complex"] = True
        return packed

    def _container(self, value: Any, path: str, depth: int) -> Any:
        def each(named: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
            return [[name, self.pack(item, f"{path}.{name}", depth)] for name, item in named]

        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            items = [item for _, item in each(enumerate(value))]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, PackedSequence):
            return {"packed": [item for _, item in each((name, getattr(value, name)) for name in PackedSequence._fields)]}
        if isinstance(value, Mapping):
            self.left_out += [f"{path}: an entry with a key of type {type(key).__name__}" for key in value if not _is_key(key)]
            return {"dict": each((key, item) for key, item in value.items() if _is_key(key))}
        if isinstance(value, tuple) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            # By its fields: the class of a dataclass or a named tuple is code and is not stored.
            names = getattr(value, "_fields", ()) if isinstance(value, tuple) else [field.name for field in dataclasses.fields(value)]
            return {"fields": each((name, getattr(value, name, None)) for name in names)}
        return self._leave_out(path, f"a {type(value).__name__}, which cannot be stored")

    def _number(self, value: complex, path: str) -> Any:
        if isinstance(value, int):
            return int(value) if -MAX_INT <= value < MAX_INT else self._leave_out(path, "an integer of more than 64 bits")
        if isinstance(value, complex) and not isinstance(value, float):
            return {"complex": [self._number(value.real, path), self._number(value.imag, path)]}
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        try:
            tensor = torch.from_numpy(np.array(value))
        except TypeError:
            return self._leave_out(path, f"an array of {value.dtype}")
        packed = self.tensor(tensor, path)
        return {"array": packed["tensor"]} if set(packed) == {"tensor"} else self._leave_out(path, f"an array of {value.dtype}")

    def _leave_out(self, path: str, reason: str) -> dict[str, Any]:
        self.left_out.append(f"{path}: {reason}")
        return {"left_out": reason}


def reason_not_storable(tensor: Tensor) -> str:
    """Why a tensor cannot be stored; "" if it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter that has no shape yet"
    if bool(is_traceable_wrapper_subclass(tensor)) or hasattr(tensor, "full_tensor"):
        return f"a {type(tensor).__name__}, which wraps other tensors"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "" if tensor.dtype in STORABLE_DTYPES else f"a tensor of {tensor.dtype}"


def _tensor_name(path: str, number: int) -> str:
    """A name in ASCII, readable if possible: names of modules may contain any character."""
    name = quote(path, safe="", errors="surrogatepass")
    # quote() never leaves a single %, so the short form cannot collide with another name.
    return name if len(name) <= MAX_NAME else f"{path.partition('.')[0]}%{number}"


def _is_key(key: object) -> bool:
    return key is None or isinstance(key, (bool, str)) or (type(key) is int and -MAX_INT <= key < MAX_INT)


# ---- reading


def unpack(tree: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The value of a JSON tree. Raises `DamagedError` for anything that `Packer` would not have written."""
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    if isinstance(tree, int):
        if not -MAX_INT <= tree < MAX_INT:
            raise DamagedError("an integer of more than 64 bits")
        return tree
    if isinstance(tree, float):
        if not math.isfinite(tree):  # 1e999
            raise DamagedError("a number that is not finite")
        return tree
    if depth > MAX_DEPTH + 1:
        raise DamagedError(f"values nested deeper than {MAX_DEPTH}")
    if isinstance(tree, list):
        return [unpack(item, tensors, depth + 1) for item in tree]
    if not isinstance(tree, dict) or not tree:
        raise DamagedError("a value of an unknown kind")
    if "tensor" in tree:
        return _tensor(tree, tensors)
    (kind, content), *more = tree.items()
    value = None if more else _value(kind, content, tensors, depth + 1)
    if value is None:
        raise DamagedError(f"an invalid value of the kind {', '.join(map(str, tree))[:80]!r}")
    return value


def _value(kind: str, content: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    """The value of `{kind: content}`; None if it is invalid."""
    parts = [unpack(item, tensors, depth) for item in content] if kind in ("tuple", "packed", "complex") and type(content) is list else []
    try:
        match kind, content:
            case "tuple", list():
                return tuple(parts)
            case "dict", list():
                return _dict(content, tensors, depth)
            case "fields", list():
                found = _dict(content, tensors, depth)
                is_valid = all(isinstance(name, str) and name.isidentifier() and not name.startswith("__") for name in found)
                return SimpleNamespace(**found) if is_valid else None
            case "packed", [_, _, _, _]:
                is_valid = all(isinstance(part, Tensor) or (part is None and i > 1) for i, part in enumerate(parts))
                return PackedSequence(*parts) if is_valid else None
            case "float", "nan" | "inf" | "-inf":
                return float(content)
            case "complex", [_, _]:
                return complex(*parts) if all(isinstance(part, float) for part in parts) else None
            case "array", str():
                return _named(content, tensors).numpy()
            case "dtype", str():
                dtype = getattr(torch, content, None)
                return dtype if isinstance(dtype, torch.dtype) else None
            case "device", str():
                return torch.device(content)
            case "left_out", str():
                return LeftOut(content)
    except (TypeError, RuntimeError):  # a tensor without a NumPy dtype, or a device that torch does not know
        return None
    return None


def _tensor(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    if set(tree) - {"tensor", "requires_grad", "complex"} or any(tree.get(flag, True) is not True for flag in ("requires_grad", "complex")):
        raise DamagedError("a tensor with unknown properties")
    tensor = _named(tree["tensor"], tensors)
    try:
        if "complex" in tree:
            tensor = torch.view_as_complex(tensor)
        return tensor.requires_grad_() if "requires_grad" in tree else tensor
    except RuntimeError as error:
        raise DamagedError(f"the tensor {tree['tensor']!r}: {str(error).splitlines()[0]}") from None


def _named(name: object, tensors: Mapping[str, Tensor]) -> Tensor:
    if not isinstance(name, str) or name not in tensors:
        raise DamagedError(f"a tensor {str(name)[:80]!r} that is missing")
    return tensors[name]


def _dict(content: Any, tensors: Mapping[str, Tensor], depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]) or pair[0] in found:
            raise DamagedError("a dict with an invalid entry")
        found[pair[0]] = unpack(pair[1], tensors, depth)
    return found


def fill_left_out(value: Any, live: Any) -> Any:
    """`value` with each `LeftOut` replaced by the value at the same position of `live`, if both have the same structure."""
    if isinstance(value, LeftOut):
        return live
    if isinstance(value, dict) and isinstance(live, Mapping):
        return {key: fill_left_out(item, live.get(key)) for key, item in value.items()}
    if isinstance(value, SimpleNamespace):
        return _copy_with(vars(value), live)
    if type(value) in (list, tuple) and isinstance(live, (list, tuple)) and len(value) == len(live):
        return type(value)(fill_left_out(item, other) for item, other in zip(value, live))
    return value


def _copy_with(fields: dict[str, Any], live: Any) -> Any:
    """A copy of the live object with these fields; a SimpleNamespace if the live object does not have them."""
    if any(not hasattr(live, name) for name in fields):
        return SimpleNamespace(**fields)
    fields = {name: fill_left_out(item, getattr(live, name)) for name, item in fields.items()}
    if isinstance(live, tuple) and hasattr(live, "_replace"):
        return live._replace(**fields)
    copied = copy.copy(live)
    for name, item in fields.items():
        object.__setattr__(copied, name, item)  # also sets fields of a frozen dataclass
    return copied
