"""Hashes of tensor contents: equal for equal contents, different for different ones."""

from __future__ import annotations

import torch

from sonde.statistics.content_hash import content_hash
from statistics_cases import each_implementation, noise  # noqa: F401


def test_equal_contents_have_equal_hashes_for_any_layout(implementation):
    for shape in ((6, 7), (700, 900)):
        x = noise(*shape).float()
        same = [x.clone(), x.t().contiguous().t(), torch.cat([x, x], 1)[:, : shape[1]], torch.nn.Parameter(x), x.as_subclass(torch.Tensor)]
        hashes = {content_hash(t) for t in [x, *same]}
        assert len(hashes) == 1
        (value,) = hashes
        assert 0 <= value < 2**52
        assert int(float(value)) == value


def test_different_contents_have_different_hashes():
    x = torch.arange(24.0)
    tensors = [x, x + 1, x.reshape(4, 6), x.reshape(6, 4), x.double(), x.long(), x.flip(0), -x, x[:23], torch.zeros(3), torch.zeros(4)]
    tensors += [torch.empty(0), torch.tensor(True), torch.tensor(1 + 2j), torch.tensor(1 - 2j), torch.tensor(1 + 2j).conj().clone() * 2]
    hashes = [content_hash(t) for t in tensors]
    assert None not in hashes
    assert len(set(hashes)) == len(hashes)
    assert content_hash(torch.tensor(1 + 2j).conj()) == content_hash(torch.tensor(1 - 2j))
    big = noise(2_000_000).float()
    assert content_hash(big) != content_hash(big + 1)


def test_a_hashed_tensor_can_still_be_resized():
    """`Tensor.numpy()` forbids that for good, and FSDP2 frees the storage of its parameters by it."""
    for dtype in (torch.float32, torch.float16, torch.bool):
        tensor = torch.ones(8, dtype=dtype)
        assert content_hash(tensor[:4]) is not None
        tensor.untyped_storage().resize_(0)
