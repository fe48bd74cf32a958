"""A hash of a tensor's content, to tell batches and inputs apart."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sonde.statistics.torch_ops import evenly_spaced, readable

WHOLE_BYTES = 1 << 20  # up to here a fingerprint is of the whole content
NUM_SAMPLES = 16384  # above it, of so many elements

_IN_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8}


def content_hash(tensor: Tensor) -> int | None:
    """52 bits that tell contents apart (a float64 holds them exactly): equal for equal dtype, shape and elements, whatever the strides.

    Up to `WHOLE_BYTES` every element counts, above it evenly spaced samples. None where unsupported, and for tensors on a device: they
    would have to be waited for.
    """
    try:
        plain = readable(tensor)
        if plain.device.type != "cpu" or plain.layout is not torch.strided:
            return None
        with torch.no_grad():
            digest = hashlib.blake2b(f"{plain.dtype}{tuple(plain.shape)}".encode(), digest_size=8)
            if plain.nbytes <= WHOLE_BYTES and plain.dtype in _IN_NUMPY and plain.is_contiguous() and not plain.is_neg():
                digest.update(plain.detach().numpy().data)  # the common case: no other torch operation
                return int.from_bytes(digest.digest(), "little") >> 12
            content = evenly_spaced(plain, NUM_SAMPLES) if plain.nbytes > WHOLE_BYTES else plain
            content = content.contiguous().resolve_conj().resolve_neg().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().data)
    except Exception:
        return None
    return int.from_bytes(digest.digest(), "little") >> 12
