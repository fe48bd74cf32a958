"""Counts FLOPs: multiplications and additions of matrix products, convolutions, attention and LSTMs, computed from shapes.

torch's own counter lacks formulas for attention and LSTMs on the CPU and for the fused layers of inference, and its formula for the
backward of grouped convolutions is wrong: the formulas here replace them. torch's counter also attributes FLOPs to modules with hooks; this
one only counts, and the trace (`LayerCallTrace`) attributes. Fused attention computes its scores again in the backward: five products
there, two in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from sonde.statistics.private_torch_api import TorchDispatchMode, op_packet


class FlopCounter:
    """Counter of FLOPs, active inside `context`."""

    def __init__(self) -> None:
        self.total = 0
        self.uncounted: set[str] = set()  # fused operations without a formula

    def read(self) -> int:
        return self.total

    @contextmanager
    def context(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Counts inside. The arguments of the model are not used."""
        with _CountingMode(self):
            yield


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the FLOPs of every dispatched operation to a counter."""

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter, self._formulas = counter, formulas()

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
            self._counter.total += int(formula(*args, **kwargs, out_val=output))
        elif packet is not None and "rnn" in packet.__name__:
            self._counter.uncounted.add(packet.__name__)
        return output


@cache
def formulas() -> dict[Any, Callable[..., int]]:
    """FLOP formulas by operation: torch's, with those below added."""
    from torch.utils import flop_counter

    registry = dict(flop_counter.flop_registry)
    for name, formula in _FORMULAS.items():
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            registry[packet] = formula
    return registry


def _attention(query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """Scores and weighted values: (B, H, L, E) x (B, H, S, E) and (B, H, L, S) x (B, H, S, V)."""
    *batch, length, width = query.shape
    return int(_product(batch) * 2 * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """The scores again, then gradients of value, of the scores, of query and of key."""
    *batch, length, width = query.shape
    return int(_product(batch) * 2 * length * key.shape[-2] * (3 * width + 2 * value.shape[-1]))


def _fast_attention(query: Any, key: Any, value: Any, width: int, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """Attention with its four projections: called by nn.MultiheadAttention in eval mode without gradients."""
    num, length = query.shape[0], query.shape[1]
    sources = key.shape[1]
    projections = 2 * num * width * width * (2 * length + 2 * sources)
    return int(projections + 4 * num * length * sources * width)


def _fast_layer(source: Any, width: int, heads: int, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """A whole nn.TransformerEncoderLayer: attention, then the two products of its feed-forward."""
    # The matrices among `rest`, in order: query/key/value, output projection, first and second of the feed-forward.
    matrices = [each for each in rest if isinstance(each, torch.Tensor) and each.dim() == 2]
    hidden = int(matrices[2].shape[0]) if len(matrices) > 2 else 0
    num, length = source.shape[0], source.shape[1]
    return int(_fast_attention(source, source, source, width) + 4 * num * length * width * hidden)


def _convolution_backward(grad: Any, source: Any, weight: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """Each requested gradient costs as much as the forward. torch's own formula ignores the groups."""
    transposed, output_mask = rest[4], rest[7]
    forward = 2 * (source if transposed else grad).numel() * _product(weight.shape[1:])
    return int(forward * (bool(output_mask[0]) + bool(output_mask[1])))


def _lstm(source: Any, weights: Any, recurrent: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    """One direction of one layer: the products with both matrices, for each element of the sequence."""
    return int(2 * _product(source.shape[:2]) * (weights.numel() + recurrent.numel()))


def _lstm_backward(source: Any, weights: Any, recurrent: Any, *rest: Any, out_val: Any = None, **more: Any) -> int:
    return 2 * _lstm(source, weights, recurrent)


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total


_FORMULAS: dict[str, Callable[..., int]] = {
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_native_multi_head_attention": _fast_attention,
    "_transformer_encoder_layer_fwd": _fast_layer,
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
}
