"""Hashes of tensor contents, to recognize a batch or an input that comes again."""

import hashlib

import torch
from torch import Tensor

from sonde.statistics.find_tensors import numpy_view
from sonde.statistics.statistics_without_extension import evenly_spaced, readable

MAX_BYTES_HASHED = 1 << 20  # of a larger tensor, only samples are hashed
NUM_SAMPLES = 16384  # elements

_NUMPY_DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8}


def content_hash(tensor: Tensor) -> int | None:
    """Hash dtype, shape and elements of a tensor; the strides do not matter. Returns 52 bits, which a float64 holds exactly. Up to
    `MAX_BYTES_HASHED` every element counts, above it evenly spaced samples. None for a tensor that is not supported, or that is on a
    device, because hashing it would wait."""
    try:
        plain = readable(tensor)
        if plain.device.type != "cpu" or plain.layout is not torch.strided:
            return None
        with torch.no_grad():
            digest = hashlib.blake2b(f"{plain.dtype}{tuple(plain.shape)}".encode(), digest_size=8)
            content = plain
            if plain.nbytes > MAX_BYTES_HASHED or plain.dtype not in _NUMPY_DTYPES or not plain.is_contiguous() or plain.is_neg():
                content = evenly_spaced(plain, NUM_SAMPLES) if plain.nbytes > MAX_BYTES_HASHED else plain
                content = content.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            digest.update(numpy_view(content).data)  # in the common case without another torch operation
    except Exception:
        return None
    return int.from_bytes(digest.digest(), "little") >> 12
