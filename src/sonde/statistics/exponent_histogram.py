"""Power-of-two histograms: how many elements of a tensor have which exponent."""

import numpy as np
import torch
from torch import Tensor

from sonde.statistics import native_extension, statistics_without_extension
from sonde.statistics.statistics_without_extension import evenly_spaced, readable


def exponents(tensor: Tensor) -> tuple[list[int], list[int]] | None:
    """Count the exponents floor(log2 |x|) of the non-zero finite elements. Waits for a tensor on a device. Returns the exponents that
    occur, ascending, and their counts; None where the tensor is not supported. Exponents of float64 are clamped to those of float32, -149
    to 127."""
    pairs = exponent_pairs(tensor, 0)
    if pairs is None:
        return None
    table = np.frombuffer(pairs).reshape(-1, 2).astype(int).T.tolist()
    return table[0], table[1]


def exponent_pairs(tensor: Tensor, limit_elements: int) -> bytes | None:
    """The same histogram as bytes: float64 pairs of an exponent and its count. Of more than `limit_elements` (0: no limit) about that many
    are counted, evenly spaced."""
    if native_extension.ENABLED:
        pairs = native_extension.extension.exponents(tensor, limit_elements)
        if pairs is not None:
            return pairs
    try:
        plain = readable(tensor)
        if limit_elements and plain.layout is torch.strided and plain.numel() > limit_elements:
            plain = evenly_spaced(plain, limit_elements)
        counts = statistics_without_extension.exponents(plain) if plain.numel() else []
    except Exception:
        return None
    lowest = statistics_without_extension.LOWEST_EXPONENT
    return np.array([(lowest + i, count) for i, count in enumerate(counts) if count], np.float64).tobytes()
