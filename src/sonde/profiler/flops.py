"""Counts FLOPs (multiplications and additions of matrix products, convolutions, attention and LSTMs, from shapes) and measures the peak.

torch's own counter lacks formulas for attention and LSTMs on the CPU and for the fused layers of inference, and its formula for the
backward of grouped convolutions is wrong. Fused attention computes its scores again in the backward: five products there, two in the
forward. The trace (`LayerCallTrace`) attributes the FLOPs to modules.
"""

import math
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, Self

import torch

from sonde.statistics.private_torch_api import TorchDispatchMode, op_packet


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of every operation that is dispatched inside `context`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.uncounted: set[str] = set()  # fused operations without a formula
        self._formulas = formulas()

    def read(self) -> int:
        return self.total

    def context(self, args: Any, kwargs: Any) -> Self:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = op_packet(func)
        formula = self._formulas.get(packet)
        if formula is None and packet is not None:
            # In inference mode composite operations are dispatched without being decomposed first.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        output = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=output))
        elif packet is not None and "rnn" in packet.__name__:
            self.uncounted.add(packet.__name__)
        return output


@cache
def formulas() -> dict[Any, Callable[..., int]]:
    """FLOP formulas by operation: torch's, with those below added."""
    from torch.utils import flop_counter

    aten = torch.ops.aten
    return flop_counter.flop_registry | {getattr(aten, name): formula for name, formula in _FORMULAS.items() if hasattr(aten, name)}


def _attention(query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """Scores and weighted values: (B, H, L, E) x (B, H, S, E) and (B, H, L, S) x (B, H, S, V)."""
    *batch, length, width = query.shape
    return int(math.prod(batch) * 2 * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """The scores again, then gradients of value, of the scores, of query and of key."""
    *batch, length, width = query.shape
    return int(math.prod(batch) * 2 * length * key.shape[-2] * (3 * width + 2 * value.shape[-1]))


def _fast_attention(query: Any, key: Any, value: Any, width: int, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """Attention with its four projections: called by nn.MultiheadAttention in eval mode without gradients."""
    num, length, sources = query.shape[0], query.shape[1], key.shape[1]
    return int(4 * num * width * width * (length + sources) + 4 * num * length * sources * width)


def _fast_layer(source: Any, width: int, heads: int, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """A whole nn.TransformerEncoderLayer: attention, then the two products of its feed-forward."""
    # The matrices among `rest`, in order: query/key/value, output projection, first and second of the feed-forward.
    matrices = [each for each in rest if isinstance(each, torch.Tensor) and each.dim() == 2]
    hidden = int(matrices[2].shape[0]) if len(matrices) > 2 else 0
    return int(_fast_attention(source, source, source, width) + 4 * math.prod(source.shape[:2]) * width * hidden)


def _convolution_backward(grad: Any, source: Any, weight: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """Each requested gradient costs as much as the forward. torch's own formula ignores the groups."""
    transposed, output_mask = rest[4], rest[7]
    forward = 2 * (source if transposed else grad).numel() * math.prod(weight.shape[1:])
    return int(forward * (bool(output_mask[0]) + bool(output_mask[1])))


def _lstm(source: Any, weights: Any, recurrent: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """One direction of one layer: the products with both matrices, for each element of the sequence."""
    return int(2 * math.prod(source.shape[:2]) * (weights.numel() + recurrent.numel()))


_FORMULAS: dict[str, Callable[..., int]] = {
    "convolution_backward": _convolution_backward, "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward, "_native_multi_head_attention": _fast_attention,
    "_transformer_encoder_layer_fwd": _fast_layer, "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": lambda *args, **more: 2 * _lstm(*args),
}  # fmt: skip


SIZES = (256, 512, 1024, 2048)  # of the matrix products that measure the peak
MAX_PRODUCT_S = 0.15  # a larger product is not tried if it would take longer
REPEATS = 4


def peak_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """The peak of this machine: the fastest of several matrix products, per dtype, device and number of threads."""
    return _peak(dtype, str(device), torch.get_num_threads())


@cache
def _peak(dtype: torch.dtype, device: str, num_threads: int) -> float:
    """Measured once per process. The fastest of a few repetitions is close to the peak: other programs can only slow them down."""
    best = 0.0
    with torch.no_grad():
        for size in SIZES:
            factor = torch.full((size, size), 0.5, dtype=dtype, device=device)
            result = torch.empty_like(factor)
            durations = [_duration_s(factor, result) for _ in range(REPEATS)]
            best = max(best, 2.0 * size**3 / min(durations[1:]))
            if min(durations) * 8 > MAX_PRODUCT_S:
                break
    return best


def _duration_s(factor: torch.Tensor, result: torch.Tensor) -> float:
    start = perf_counter()
    torch.mm(factor, factor, out=result)
    if factor.device.type != "cpu":  # pragma: no cover - no device here to try it on
        torch.accelerator.synchronize(factor.device)
    return max(perf_counter() - start, 1e-9)
