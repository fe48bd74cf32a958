"""Power-of-two histograms: how many elements of a tensor have which exponent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sonde.statistics import native, torch_ops
from sonde.statistics.torch_ops import evenly_spaced, readable


def exponents(tensor: Tensor) -> tuple[list[int], list[int]] | None:
    """The power-of-two histogram: each floor(log2 |x|) among the non-zero finite elements, and how many have it; None where unsupported.

    float64 is clamped to the exponents of float32, -149 to 127. A tensor on a device is waited for.
    """
    pairs = exponent_pairs(tensor, 0)
    if pairs is None:
        return None
    table = np.frombuffer(pairs).reshape(-1, 2).astype(int).T.tolist()
    return table[0], table[1]


def exponent_pairs(tensor: Tensor, limit_elements: int) -> bytes | None:
    """The same as float64 in memory: an exponent and its count, and so on. Of more than `limit_elements` (0: no limit) about so many are
    counted, evenly spaced."""
    if native.ENABLED:
        found = native.extension.exponents(tensor, limit_elements)
        if found is not None:
            return found
    try:
        plain = readable(tensor)
        if limit_elements and plain.layout is torch.strided and plain.numel() > limit_elements:
            plain = evenly_spaced(plain, limit_elements)
        counts = torch_ops.exponents(plain) if plain.numel() else []
    except Exception:
        return None
    pairs = [(i + torch_ops.LOWEST_EXPONENT, count) for i, count in enumerate(counts) if count]
    return np.array(pairs, np.float64).tobytes()
