"""Statistics by torch operations: for tensors that the native kernel does not take, and for machines where it was not built.

Hardly anything here waits for a device: results stay tensors until the caller brings them over. All is computed in float64 (float32 on
devices without it) from detached tensors, with dtype and device always named, so the user's defaults do not reach it. Nor does
autocast, which leaves float64 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

# Elements converted at a time, which bounds the memory that a large tensor costs. On a CPU a chunk stays in the second-level cache.
CHUNK_ON_CPU = 1 << 16
CHUNK = 1 << 24
LOWEST_EXPONENT, HIGHEST_EXPONENT = -149, 127  # of float32, denormals included

_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "float16", "bfloat16", "float32", "float64",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool",
        "complex32", "complex64", "complex128",
    )
    if hasattr(torch, name)
)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
# Private, so its absence must not hurt: without it a functorch tensor fails on its missing storage instead, in worse words.
_is_functorch: Callable[[Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda _: False
)


class Unsupported(Exception):
    """This tensor has no numbers that Sonde can read; the text says why."""


def reason(error: Exception) -> str:
    """Why a tensor was not measured, in a line."""
    if isinstance(error, Unsupported):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}"[:200]


@torch.no_grad()
def readable(tensor: Tensor) -> Tensor:
    """The plain, detached tensor that holds the elements of this one; raises where there is none."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        tensor = _unwrapped(tensor)
    if _is_functorch(tensor):
        raise Unsupported("tensors inside torch.func transforms (vmap, grad) are not measured")
    if tensor.is_meta:
        raise Unsupported("meta tensors hold no values")
    if tensor.is_nested or tensor.layout is getattr(torch, "jagged", None):
        raise Unsupported("nested and jagged tensors are not measured")
    if tensor.is_quantized:
        raise Unsupported("quantised tensors are not measured")
    if tensor.dtype not in _DTYPES:
        raise Unsupported(f"tensors of {tensor.dtype} are not measured")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported("nothing is measured while a CUDA graph is captured")
    if tensor.layout is torch.strided and tensor.numel() and not tensor._is_zerotensor():
        last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        # FSDP frees the storage of parameters that are not in use; reading such a tensor ends the process.
        if (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise Unsupported("its memory is freed at this moment")
    return tensor.detach()


def _unwrapped(tensor: Tensor) -> Tensor:
    kind = type(tensor)
    if is_lazy(tensor):
        raise Unsupported("lazy parameters have no values before the first forward")
    if kind.__name__ == "FakeTensor":
        raise Unsupported("fake tensors hold no values")
    if kind.__name__ == "NestedTensor":
        raise Unsupported("nested and jagged tensors are not measured")
    if kind.__name__ == "DTensor":
        return _plain(tensor.to_local())  # type: ignore[attr-defined]  # this rank's part: gathering would be a collective
    return _plain(tensor)


def _plain(tensor: Tensor) -> Tensor:
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return tensor
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise Unsupported(f"{kind.__name__} keeps its numbers where Sonde cannot read them")
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


class _Part(NamedTuple):
    """Of the finite elements, as in the native kernel; every field is a tensor without dimensions."""

    num: Tensor
    mean: Tensor
    m2: Tensor
    low: Tensor
    high: Tensor
    zeros: Tensor
    nan: Tensor
    inf: Tensor


@torch.no_grad()
def statistics(tensor: Tensor, minus: Tensor | None = None) -> Tensor | None:
    """`STATISTICS` of a readable tensor, or of its difference to another, as one tensor on its device; None where it is empty."""
    if tensor.numel() == 0:
        return None
    values, num_implicit = values_of(tensor)
    if minus is None:
        values, repeats = _without_expansion(values)
    elif num_implicit or minus.shape != values.shape:
        raise Unsupported("its shape or layout changed within the step")
    else:
        repeats = 1
    wide = _wide(values.device)
    chunks = _chunks(values, minus, wide)
    scale: Tensor | None = None
    if wide is torch.float32 or values.dtype in (torch.float64, torch.complex128):
        # Their squares leave the range of the type that they are computed in.
        scale = torch.stack([*(x.nan_to_num(0.0, 0.0, 0.0).abs().amax() for x in chunks()), _number(0, values, wide)]).amax()
        scale = torch.where(scale == 0, 1.0, scale)
    total: _Part | None = None
    for x in chunks():
        part = _describe(x, scale)
        total = part if total is None else _join(total, part)
    if num_implicit or total is None:
        zero = _number(0, values, wide)
        implicit = _number(num_implicit, values, wide)
        nothing = _Part(implicit, zero, zero, zero, zero, implicit, zero, zero)
        total = nothing if total is None else _join(total, nothing)
    safe = total.num.clamp(min=1)
    mean, std = total.mean, (total.m2 / safe).sqrt()
    l2 = ((total.m2 + total.num * total.mean * total.mean) * repeats).sqrt()
    if scale is not None:
        mean, std, l2 = mean * scale, std * scale, l2 * scale
    low, high = (torch.where(total.num > 0, x, 0.0) for x in (total.low, total.high))
    counts = (total.zeros * repeats, total.nan * repeats, total.inf * repeats)
    return torch.stack([_number(tensor.numel(), values, wide), mean, std, low, high, l2, *counts])


def _describe(x: Tensor, scale: Tensor | None) -> _Part:
    # Chosen by the clock: isfinite() costs four of these operations, and the sum of truth values three of count_nonzero.
    y = x.nan_to_num(0.0, 0.0, 0.0)
    finite = y == x
    num, nan = torch.count_nonzero(finite).to(x.dtype), torch.count_nonzero(x != x).to(x.dtype)
    low = x.nan_to_num(math.inf, math.inf, math.inf).amin()
    high = x.nan_to_num(-math.inf, -math.inf, -math.inf).amax()
    safe = num.clamp(min=1)
    if scale is not None:
        y = y / scale
    centre = y.sum() / safe
    deviation = torch.where(finite, y - centre, 0.0)
    off = deviation.sum()
    m2 = ((deviation * deviation).sum() - off * off / safe).clamp(min=0)
    zeros = x.numel() - torch.count_nonzero(x).to(x.dtype)
    return _Part(num, centre + off / safe, m2, low, high, zeros, nan, x.numel() - num - nan)


def _join(a: _Part, b: _Part) -> _Part:
    num = a.num + b.num
    safe = num.clamp(min=1)
    apart = b.mean - a.mean
    mean = torch.where(a.num == 0, b.mean, a.mean + apart * (b.num / safe))
    m2 = a.m2 + b.m2 + apart * apart * (a.num * b.num / safe)
    low, high = torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
    return _Part(num, mean, m2, low, high, a.zeros + b.zeros, a.nan + b.nan, a.inf + b.inf)


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each readable tensor; not finite where an element is not, or where it is too large to tell."""
    return [_norm(values_of(tensor)[0]) for tensor in tensors]


def _norm(values: Tensor) -> Tensor:
    values, repeats = _without_expansion(values)
    wide = _wide(values.device)
    parts = [torch.linalg.vector_norm(x) for x in _chunks(values, None, wide)()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts or [_number(0, values, wide)]))
    return norm * math.sqrt(repeats)


@torch.no_grad()
def nonzero(tensor: Tensor, limit: int) -> Tensor:
    """Whether any of the first elements of a readable tensor is not zero."""
    return (real_part(values_of(tensor)[0].reshape(-1)[:limit]) != 0).any()


@torch.no_grad()
def exponents(tensor: Tensor) -> list[int]:
    """How many elements have floor(log2 |x|) = LOWEST_EXPONENT, and so on. SyncPoints for the device."""
    values, repeats = _without_expansion(values_of(tensor)[0])
    if _wide(values.device) is not torch.float64:
        raise Unsupported(f"exponents are not counted on {values.device.type}")
    size = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
    total = torch.zeros(size + 1, dtype=torch.int64, device=values.device)
    for x in _chunks(values, None, torch.float64)():
        exponent = ((x.contiguous().view(torch.int64) >> 52) & 0x7FF) - 1023
        exponent = exponent.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
        # Zeros and non-finite values go to one place more, so that no mask has to be read.
        total += torch.bincount(torch.where((x != 0) & x.isfinite(), exponent, size), minlength=size + 1)
    return [count * repeats for count in total[:size].tolist()]


def values_of(tensor: Tensor) -> tuple[Tensor, int]:
    """The stored elements, and how many zeros are not stored."""
    if tensor.layout is torch.strided:
        return tensor, 0
    if tensor.layout is torch.sparse_coo:
        values = tensor._values()
        if not tensor.is_coalesced():
            # Equal indices stand for their sum. It is made in a copy: coalescing in place would change the user's tensor.
            wide = torch.complex128 if values.is_complex() else _wide(values.device)
            copy = torch.sparse_coo_tensor(
                tensor._indices(), values.to(wide), tensor.shape, device=values.device, dtype=wide, check_invariants=False
            )
            values = copy.coalesce()._values()
    elif tensor.layout in _COMPRESSED:
        values = tensor.values()
    else:
        values = tensor.to_dense()
    return values, tensor.numel() - values.numel()


def _without_expansion(values: Tensor) -> tuple[Tensor, int]:
    """One of each repeated element, and how often it counts."""
    repeats = 1
    for dim, (size, step) in enumerate(zip(values.shape, values.stride())):
        if step == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
            repeats *= size
    return values, repeats


def _chunks(values: Tensor, minus: Tensor | None, wide: torch.dtype) -> Callable[[], Iterator[Tensor]]:
    flat = values.reshape(-1)
    other = None if minus is None else minus.reshape(-1)
    size = CHUNK_ON_CPU if values.device.type == "cpu" else CHUNK

    def chunks() -> Iterator[Tensor]:
        for start in range(0, flat.numel(), size):
            x = real_part(flat[start : start + size], wide)
            yield x if other is None else x - real_part(other[start : start + size], wide)

    return chunks


def real_part(values: Tensor, wide: torch.dtype | None = None) -> Tensor:
    """As real numbers in the widest type of the device; of complex numbers the absolute values."""
    wide = wide or _wide(values.device)
    if values.is_complex():
        return values.to(torch.complex128 if wide is torch.float64 else torch.complex64).abs()
    return values.to(wide)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _number(value: float, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((), value, dtype=dtype, device=like.device)


def unsupported_reason(tensor: Tensor) -> str | None:
    """None where the tensor can be measured, else the reason in words."""
    try:
        readable(tensor)
    except Exception as error:
        return reason(error)
    return None


def evenly_spaced(plain: Tensor, num: int) -> Tensor:
    index = torch.arange(num, dtype=torch.int64, device=plain.device) * (plain.numel() // num)
    return plain[torch.unravel_index(index, plain.shape)]
