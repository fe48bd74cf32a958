"""What a model is called with, as strict JSON that refers to tensors by name, and back. Nothing that is read is ever run.

Lists, texts, whole numbers, booleans and None are JSON's own; everything else is an object of one key that says what it is:
`{"tensor": "args/0"}`, `{"tuple": […]}`, `{"dict": [[key, value], …]}`, `{"float": "NaN"}`, `{"left_out": "a function"}`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MAX_DEPTH = 32
MAX_LEAVES = 200_000  # values in one capsule: the optimizer state of a large model has some ten thousand
MAX_INT = 2**63
MAX_NAME = 200  # characters of a tensor's name; a longer one becomes a number
PACKED = ("data", "batch_sizes", "sorted_indices", "unsorted_indices")  # what a PackedSequence consists of


KEPT = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    }
)  # fmt: skip


class DamagedError(ValueError):
    """What is read cannot have been written by Sonde."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Stands where a value was that no capsule keeps."""

    reason: str


class Packer:
    """Turns values into JSON and gathers their tensors by name. The tensors are the live ones, without their graphs."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.left_out: list[str] = []  # "args.1: a function", one sentence each
        self._names: dict[int, str] = {}  # of tensors by identity: what is passed twice is kept once
        self._num_leaves = 0

    def pack(self, value: Any, place: str, depth: int = 0) -> Any:
        """`value` as JSON. `place` names it in what is said to people, and names its tensors: `args.0`."""
        self._num_leaves += 1
        if self._num_leaves > MAX_LEAVES:
            return self._leave(place, f"more than {MAX_LEAVES:,} values")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)  # an Enum of texts is its text
        if isinstance(value, Tensor):
            return self.tensor(value, place)
        if isinstance(value, np.generic):
            return self.pack(value.item(), place, depth)
        if isinstance(value, (int, float, complex)):
            return self._number(value, place)
        if isinstance(value, np.ndarray):
            return self._array(value, place)
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if depth >= MAX_DEPTH:
            return self._leave(place, f"nested deeper than {MAX_DEPTH}")
        return self._container(value, place, depth + 1)

    def tensor(self, tensor: Tensor, place: str) -> dict[str, Any]:
        why = unkeepable(tensor)
        if why:
            return self._leave(place, why)
        name = self._names.get(id(tensor))
        if name is None:
            name = self._names[id(tensor)] = _tensor_name(place, len(self.tensors))
            self.tensors[name] = tensor.detach()
            if tensor.grad_fn is not None:
                self.left_out.append(f"{place}: the graph that it was computed with; its values are kept")
        packed: dict[str, Any] = {"tensor": name}
        if tensor.requires_grad:
            packed["requires_grad"] = True
        if tensor.is_complex():
            packed["complex"] = True
        return packed

    def _container(self, value: Any, place: str, depth: int) -> Any:
        def each(items: Any) -> list[Any]:
            return [self.pack(item, f"{place}.{i}", depth) for i, item in enumerate(items)]

        if isinstance(value, PackedSequence):
            return {"packed": [self.pack(getattr(value, name), f"{place}.{name}", depth) for name in PACKED]}
        if isinstance(value, list):
            return each(value)
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                return self._fields(value, value._fields, place, depth)
            return {"tuple": each(value)}
        if isinstance(value, Mapping):
            return self._mapping(value, place, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._fields(value, [field.name for field in dataclasses.fields(value)], place, depth)
        return self._leave(place, f"a {type(value).__name__}, which no capsule keeps")

    def _mapping(self, value: Mapping[Any, Any], place: str, depth: int) -> Any:
        pairs = []
        for key, item in value.items():
            if not _is_key(key):
                self.left_out.append(f"{place}: an entry whose key is a {type(key).__name__}")
                continue
            pairs.append([key, self.pack(item, f"{place}.{key}", depth)])
        return {"dict": pairs}

    def _fields(self, value: Any, names: Any, place: str, depth: int) -> Any:
        """A dataclass or a named tuple: its class is code and is not kept, its fields come back by their names."""
        return {"fields": [[name, self.pack(getattr(value, name, None), f"{place}.{name}", depth)] for name in names]}

    def _number(self, value: complex, place: str) -> Any:
        if isinstance(value, int):
            return int(value) if -MAX_INT <= value < MAX_INT else self._leave(place, "a whole number of more than 64 bits")
        if isinstance(value, complex) and not isinstance(value, float):
            return {"complex": [self._number(value.real, place), self._number(value.imag, place)]}
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}

    def _array(self, value: np.ndarray[Any, Any], place: str) -> Any:
        try:
            tensor = torch.from_numpy(np.array(value))
        except TypeError:
            return self._leave(place, f"an array of {value.dtype}")
        packed = self.tensor(tensor, place)
        return {"array": packed["tensor"]} if set(packed) == {"tensor"} else self._leave(place, f"an array of {value.dtype}")

    def _leave(self, place: str, reason: str) -> dict[str, Any]:
        self.left_out.append(f"{place}: {reason}")
        return {"left_out": reason}


def unkeepable(tensor: Tensor) -> str:
    """Why a tensor cannot be kept; "" where it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter that has no shape yet"
    if _is_wrapper(tensor):
        return f"a {type(tensor).__name__}, whose parts live elsewhere"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "" if tensor.dtype in KEPT else f"a tensor of {tensor.dtype}"


def _is_wrapper(value: Any) -> bool:
    return is_traceable_wrapper_subclass(value) or hasattr(value, "full_tensor")


def _tensor_name(place: str, number: int) -> str:
    """Readable where it can be, and always plain ASCII: modules may be named with anything."""
    name = quote(place, safe="", errors="surrogatepass")
    # A bare % is never left behind by quote(): no name is taken twice.
    return name if len(name) <= MAX_NAME else f"{place.partition('.')[0]}%{number}"


def _is_key(key: object) -> bool:
    return key is None or isinstance(key, (bool, str)) or (type(key) is int and -MAX_INT <= key < MAX_INT)


# ---- back


def unpack(tree: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The value that was packed. Anything that `Packer` would not have written is a DamagedError."""
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    if isinstance(tree, int):
        return _checked(tree, -MAX_INT <= tree < MAX_INT, "a whole number of more than 64 bits")
    if isinstance(tree, float):
        return _checked(tree, math.isfinite(tree), "a number that JSON has no word for")
    if depth > MAX_DEPTH + 1:
        raise DamagedError(f"values nested deeper than {MAX_DEPTH}")
    if isinstance(tree, list):
        return [unpack(item, tensors, depth + 1) for item in tree]
    if not isinstance(tree, dict) or not tree:
        raise DamagedError("a value of no known kind")
    if "tensor" in tree:
        return _tensor(tree, tensors)
    (kind, content), *more = tree.items()
    back = _KINDS.get(kind)
    if more or back is None:
        raise DamagedError(f"a value of the unknown kind {', '.join(map(str, tree))[:80]!r}")
    return back(content, tensors, depth + 1)


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
        raise DamagedError(f"a tensor {str(name)[:80]!r} that is not there")
    return tensors[name]


def _items(content: Any, tensors: Mapping[str, Tensor], depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise DamagedError("a container that is not a list")
    return [unpack(item, tensors, depth) for item in content]


def _dict(content: Any, tensors: Mapping[str, Tensor], depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in content if isinstance(content, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]) or pair[0] in found:
            raise DamagedError("a dict with something that cannot be an entry")
        found[pair[0]] = unpack(pair[1], tensors, depth)
    return found


def _fields(content: Any, tensors: Mapping[str, Tensor], depth: int) -> SimpleNamespace:
    found = _dict(content, tensors, depth)
    proper = all(isinstance(name, str) and name.isidentifier() and not name.startswith("__") for name in found)
    return SimpleNamespace(**_checked(found, proper, "a field without a proper name"))


def _packed(content: Any, tensors: Mapping[str, Tensor], depth: int) -> PackedSequence:
    parts = _items(content, tensors, depth)
    proper = len(parts) == 4 and all(isinstance(part, Tensor) for part in parts[:2])
    data, batch_sizes, *orders = _checked(parts, proper and all(part is None or isinstance(part, Tensor) for part in parts), "a sequence")
    return PackedSequence(data, batch_sizes, *orders)


def _float(content: Any, tensors: Mapping[str, Tensor], depth: int) -> float:
    return float(_checked(content, content in ("nan", "inf", "-inf"), "a number of no known kind"))


def _complex(content: Any, tensors: Mapping[str, Tensor], depth: int) -> complex:
    parts = _items(content, tensors, depth)
    return complex(*_checked(parts, len(parts) == 2 and all(isinstance(part, float) for part in parts), "a complex number"))


def _array(content: Any, tensors: Mapping[str, Tensor], depth: int) -> np.ndarray[Any, Any]:
    try:
        return _named(content, tensors).numpy()
    except (TypeError, RuntimeError):
        raise DamagedError("an array that NumPy has no type for") from None


def _dtype(content: Any, tensors: Mapping[str, Tensor], depth: int) -> torch.dtype:
    dtype = getattr(torch, content, None) if isinstance(content, str) else None
    if not isinstance(dtype, torch.dtype):
        raise DamagedError("a dtype that torch does not have")
    return dtype


def _device(content: Any, tensors: Mapping[str, Tensor], depth: int) -> torch.device:
    try:
        return torch.device(_checked(content, isinstance(content, str), "a device"))
    except RuntimeError:
        raise DamagedError("a device that torch does not know") from None


def _checked(value: Any, is_sound: bool, what: str) -> Any:
    if not is_sound:
        raise DamagedError(f"{what} where none can be")
    return value


_KINDS: dict[str, Callable[[Any, Mapping[str, Tensor], int], Any]] = {
    "tuple": lambda content, tensors, depth: tuple(_items(content, tensors, depth)),
    "dict": _dict,
    "fields": _fields,
    "packed": _packed,
    "float": _float,
    "complex": _complex,
    "array": _array,
    "dtype": _dtype,
    "device": _device,
    "left_out": lambda content, tensors, depth: LeftOut(_checked(content, isinstance(content, str), "a reason")),
}


def graft(value: Any, live: Any) -> Any:
    """`value` with what was left out of it taken from `live`, where that is built alike."""
    if isinstance(value, LeftOut):
        return live
    if isinstance(value, dict) and isinstance(live, Mapping):
        return {key: graft(item, live.get(key)) for key, item in value.items()}
    if isinstance(value, SimpleNamespace):
        return _rebuilt(vars(value), live)
    if type(value) in (list, tuple) and isinstance(live, (list, tuple)) and len(value) == len(live):
        return type(value)(graft(item, other) for item, other in zip(value, live))
    return value


def _rebuilt(fields: dict[str, Any], live: Any) -> Any:
    """An object of the live one's class, where it has the same fields."""
    if any(not hasattr(live, name) for name in fields):
        return SimpleNamespace(**fields)
    fields = {name: graft(item, getattr(live, name)) for name, item in fields.items()}
    if isinstance(live, tuple) and hasattr(live, "_replace"):
        return live._replace(**fields)
    twin = copy.copy(live)
    for name, item in fields.items():
        object.__setattr__(twin, name, item)  # a frozen dataclass too: the twin is ours
    return twin
