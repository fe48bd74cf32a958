"""Statistics by torch operations, for tensors that the native extension does not handle and for machines where it was not built.

Only `exponents` waits for a device: the other results stay tensors on their device. Everything is computed in float64 (float32 on devices
without it). Dtype and device are always explicit, so the user's defaults have no effect, and autocast does not touch float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from sonde.statistics.private_torch_api import is_functorch_tensor, is_zero_tensor, sparse_indices, sparse_values, without_torch_function

# Elements converted at a time, which bounds the extra memory for a large tensor. On a CPU a chunk stays in the second-level cache.
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


class Unsupported(Exception):
    """Raised for a tensor whose values Sonde cannot read; the message is the reason."""


def reason(error: Exception) -> str:
    """One line that says why a tensor was not measured."""
    if isinstance(error, Unsupported):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}"[:200]


@torch.no_grad()
def readable(tensor: Tensor) -> Tensor:
    """The plain detached tensor with the elements of this one, which may be of a subclass. Raises `Unsupported` where there is none."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        tensor = _unwrapped(tensor)
        if has_own_dispatch(tensor):
            raise Unsupported(f"{type(tensor).__name__} implements __torch_dispatch__, so its memory cannot be read")
    return _checked(tensor)


@torch.no_grad()
def measurable(tensor: Tensor) -> Tensor:
    """As `readable`; also a detached tensor of a class with `__torch_dispatch__`, whose values only torch operations can reach. Its
    operations run code of the user, so they may raise anything, and their results are of that class too: `fetch_all` reads them."""
    if not has_own_dispatch(tensor):
        return readable(tensor)
    tensor = _unwrapped(tensor)
    if not has_own_dispatch(tensor):
        return _checked(tensor)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        # Ranks observe different steps: a collective in an operation of this class would wait for the others forever.
        raise Unsupported(f"{type(tensor).__name__} implements __torch_dispatch__, which may communicate with other ranks")
    return _checked(tensor)


def has_own_dispatch(tensor: Tensor) -> bool:
    """Whether the class of the tensor computes its operations itself."""
    kind = type(tensor)
    return kind is not Tensor and kind is not Parameter and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _checked(tensor: Tensor) -> Tensor:
    if is_functorch_tensor(tensor):
        raise Unsupported("tensors inside torch.func transforms (vmap, grad) are not measured")
    if tensor.is_meta:
        raise Unsupported("meta tensors hold no values")
    if tensor.is_nested or tensor.layout is getattr(torch, "jagged", None):
        raise Unsupported("nested and jagged tensors are not measured")
    if tensor.is_quantized:
        raise Unsupported("quantized tensors are not measured")
    if tensor.dtype not in _DTYPES:
        raise Unsupported(f"tensors of {tensor.dtype} are not measured")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported("nothing is measured while a CUDA graph is captured")
    if has_own_dispatch(tensor):  # it has no storage of its own
        try:
            with without_torch_function():
                return tensor.detach()
        except Exception as error:
            raise Unsupported(f"{type(tensor).__name__} implements __torch_dispatch__, and detach() fails: {reason(error)}") from error
    if tensor.layout is torch.strided and tensor.numel() and not is_zero_tensor(tensor):
        last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        # FSDP frees the storage of parameters that are not in use; reading such a tensor crashes the process.
        if (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise Unsupported("its storage is freed at this moment")
    return tensor.detach()


def _unwrapped(tensor: Tensor) -> Tensor:
    kind = type(tensor)
    if is_lazy(tensor):
        raise Unsupported("lazy parameters have no values before the first forward")
    if kind.__name__ in ("FakeTensor", "FunctionalTensor"):
        raise Unsupported("fake tensors hold no values")
    if kind.__name__ == "NestedTensor":
        raise Unsupported("nested and jagged tensors are not measured")
    if kind.__name__ == "DTensor":
        tensor = tensor.to_local()  # type: ignore[attr-defined]  # the local shard: gathering would be a collective
        kind = type(tensor)
    if kind is Tensor or kind is Parameter or has_own_dispatch(tensor):
        return tensor
    with without_torch_function():
        return tensor.as_subclass(Tensor)


class _Moments(NamedTuple):
    """Moments of the finite elements of a chunk and counts of the others, as in the native extension; each a tensor without dimensions."""

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
    """`STATISTICS` of a readable tensor, or of its difference to `minus`, as one tensor on its device; None where it is empty."""
    if tensor.numel() == 0:
        return None
    values, num_implicit = values_of(tensor)
    if minus is not None and (num_implicit or minus.shape != values.shape):
        raise Unsupported("its shape or layout changed within the step")
    values, repeats = _without_expansion(values) if minus is None else (values, 1)
    wide = _wide(values.device)
    chunks = _chunks(values, minus, wide)
    scale: Tensor | None = None
    if wide is torch.float32 or values.dtype in (torch.float64, torch.complex128):
        # Squares may leave the range of the type that they are computed in.
        scale = torch.stack([*(x.nan_to_num(0.0, 0.0, 0.0).abs().amax() for x in chunks()), _number(0, values, wide)]).amax()
        scale = torch.where(scale == 0, 1.0, scale)
    total: _Moments | None = None
    for x in chunks():
        moments = _measure_chunk(x, scale)
        total = moments if total is None else _merge(total, moments)
    if num_implicit or total is None:
        zero = _number(0, values, wide)
        implicit = _number(num_implicit, values, wide)
        zeros = _Moments(implicit, zero, zero, zero, zero, implicit, zero, zero)
        total = zeros if total is None else _merge(total, zeros)
    safe = total.num.clamp(min=1)
    mean, std = total.mean, (total.m2 / safe).sqrt()
    l2 = ((total.m2 + total.num * total.mean * total.mean) * repeats).sqrt()
    if scale is not None:
        mean, std, l2 = mean * scale, std * scale, l2 * scale
    low, high = (torch.where(total.num > 0, x, 0.0) for x in (total.low, total.high))
    counts = (total.zeros * repeats, total.nan * repeats, total.inf * repeats)
    return torch.stack([_number(tensor.numel(), values, wide), mean, std, low, high, l2, *counts])


def _measure_chunk(x: Tensor, scale: Tensor | None) -> _Moments:
    # Chosen by measured time: isfinite() costs as much as four of these operations, the sum of booleans as much as three count_nonzero.
    y = x.nan_to_num(0.0, 0.0, 0.0)
    finite = y == x
    num, nan = torch.count_nonzero(finite).to(x.dtype), torch.count_nonzero(x != x).to(x.dtype)
    low = x.nan_to_num(math.inf, math.inf, math.inf).amin()
    high = x.nan_to_num(-math.inf, -math.inf, -math.inf).amax()
    safe = num.clamp(min=1)
    if scale is not None:
        y = y / scale
    center = y.sum() / safe
    deviation = torch.where(finite, y - center, 0.0)
    error = deviation.sum()
    m2 = ((deviation * deviation).sum() - error * error / safe).clamp(min=0)
    zeros = x.numel() - torch.count_nonzero(x).to(x.dtype)
    return _Moments(num, center + error / safe, m2, low, high, zeros, nan, x.numel() - num - nan)


def _merge(a: _Moments, b: _Moments) -> _Moments:
    num = a.num + b.num
    safe = num.clamp(min=1)
    delta = b.mean - a.mean
    mean = torch.where(a.num == 0, b.mean, a.mean + delta * (b.num / safe))
    m2 = a.m2 + b.m2 + delta * delta * (a.num * b.num / safe)
    low, high = torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
    return _Moments(num, mean, m2, low, high, a.zeros + b.zeros, a.nan + b.nan, a.inf + b.inf)


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each readable tensor; not finite if an element is not, or if the squares overflow."""
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
    """How many elements have which floor(log2 |x|), from `LOWEST_EXPONENT` on. Waits for the device."""
    values, repeats = _without_expansion(values_of(tensor)[0])
    if _wide(values.device) is not torch.float64:
        raise Unsupported(f"exponents are not counted on {values.device.type}")
    size = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
    total = torch.zeros(size + 1, dtype=torch.int64, device=values.device)
    for x in _chunks(values, None, torch.float64)():
        exponent = ((x.contiguous().view(torch.int64) >> 52) & 0x7FF) - 1023
        exponent = exponent.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
        # Zeros and non-finite values go to an extra bin: selecting the others by a mask would wait for the device.
        total += torch.bincount(torch.where((x != 0) & x.isfinite(), exponent, size), minlength=size + 1)
    return [count * repeats for count in total[:size].tolist()]


def values_of(tensor: Tensor) -> tuple[Tensor, int]:
    """The stored elements of a tensor, which may be sparse, and the number of zeros that are not stored."""
    if tensor.layout is torch.strided:
        return tensor, 0
    if tensor.layout is torch.sparse_coo:
        values = sparse_values(tensor)
        if not tensor.is_coalesced():
            # Values at equal indices are summed, in a copy: coalescing in place would change the user's tensor.
            wide = torch.complex128 if values.is_complex() else _wide(values.device)
            copy = torch.sparse_coo_tensor(
                sparse_indices(tensor), values.to(wide), tensor.shape, device=values.device, dtype=wide, check_invariants=False
            )
            values = sparse_values(copy.coalesce())
    elif tensor.layout in _COMPRESSED:
        values = tensor.values()
    else:
        values = tensor.to_dense()
    return values, tensor.numel() - values.numel()


def _without_expansion(values: Tensor) -> tuple[Tensor, int]:
    """An expanded tensor without its repetitions, and how often each element repeats."""
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
    """The values in the widest floating type of the device; the absolute values of complex numbers."""
    wide = wide or _wide(values.device)
    if values.is_complex():
        return values.to(torch.complex128 if wide is torch.float64 else torch.complex64).abs()
    return values.to(wide)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _number(value: float, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((), value, dtype=dtype, device=like.device)


def unsupported_reason(tensor: Tensor) -> str | None:
    """Why the tensor cannot be measured; None where it can."""
    try:
        measurable(tensor)
    except Exception as error:
        return reason(error)
    return None


def evenly_spaced(plain: Tensor, num: int) -> Tensor:
    """A sample of `num` elements."""
    index = torch.arange(num, dtype=torch.int64, device=plain.device) * (plain.numel() // num)
    return plain[torch.unravel_index(index, plain.shape)]
