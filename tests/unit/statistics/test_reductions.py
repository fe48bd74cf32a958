"""The finite check and the search for a non-zero element, by every implementation, against numpy in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sonde.statistics import reductions
from statistics_cases import FLOATS, as_numpy, each_implementation, noise  # noqa: F401

# finite check


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_the_finite_check_returns_the_sum_of_squares_of_all_tensors(implementation, dtype, factor):
    tensors = [(noise(n, seed=n) * factor).to(dtype) for n in (1, 5, 64, 4097, 20_000)]
    expected = sum((as_numpy(t) ** 2).sum() for t in tensors)
    assert reductions.check_finite([tensors[0], None, *tensors[1:], torch.empty(0)]) == (pytest.approx(expected, rel=1e-5), -1)


@pytest.mark.parametrize("factor", [1e25, 1e-25, 3e37, 1e-42])
def test_the_sum_of_squares_is_right_where_float32_squares_overflow_or_vanish(implementation, factor):
    x = (noise(10_000) * factor).float()
    assert reductions.check_finite([x]) == (pytest.approx((as_numpy(x) ** 2).sum(), rel=1e-5, abs=0), -1)


def test_the_sum_of_squares_is_right_for_blocks_of_different_magnitude(implementation):
    x = torch.cat([torch.zeros(5000), torch.full((5000,), 1e-22), torch.full((5000,), 1e-20)])
    assert reductions.check_finite([x]) == (pytest.approx((as_numpy(x) ** 2).sum(), rel=1e-5, abs=0), -1)


def test_finite_float64_values_with_overflowing_squares_are_finite(implementation):
    total, first_bad = reductions.check_finite([torch.full((10,), 1e200, dtype=torch.float64)])
    assert first_bad == -1
    assert total == math.inf


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 4096, 9999])
def test_the_finite_check_returns_the_first_tensor_with_a_non_finite_value(implementation, dtype, bad, place):
    tensors = [noise(10_000, seed=i).to(dtype) for i in range(4)]
    tensors[1][place] = bad
    tensors[3][0] = bad
    total, first_bad = reductions.check_finite([None, *tensors])
    assert first_bad == 2
    assert not math.isfinite(total)


def test_the_first_non_finite_tensor_is_found_among_native_sparse_and_complex_ones(implementation):
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    bad_sparse = torch.sparse_coo_tensor([[0]], [math.inf], (3,), check_invariants=True)
    bad_complex = torch.tensor([complex(math.nan, 1)])
    assert reductions.check_finite([good, bad_sparse, bad])[1] == 1
    assert reductions.check_finite([good, bad, bad_complex])[1] == 1
    assert reductions.check_finite([bad_complex, bad_sparse, bad])[1] == 0
    assert reductions.check_finite([torch.arange(3), good, bad_sparse])[1] == 2


def test_the_finite_check_sums_sparse_values_at_equal_indices(implementation):
    x = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (5,), check_invariants=True)
    assert reductions.check_finite([x]) == (pytest.approx(18.0), -1)


def test_the_finite_check_counts_every_element_of_an_expanded_tensor(implementation):
    assert reductions.check_finite([torch.tensor([2.0]).expand(1000)]) == (pytest.approx(4000.0), -1)
    assert reductions.check_finite([]) == (0.0, -1)


# non-zero elements


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_a_non_zero_element_is_found_within_the_limit(implementation, dtype):
    zeros = torch.zeros(5000).to(dtype)
    assert reductions.any_nonzero([None, zeros, torch.empty(0)]) is False
    for place in (0, 1, 64, 4095):
        x = torch.zeros(5000)
        x[place] = 1.0
        assert reductions.any_nonzero([zeros, None, x.to(dtype)]) is True
        assert reductions.any_nonzero([x.to(dtype)], place) is False
        assert reductions.any_nonzero([x.to(dtype)], place + 1) is True


def test_negative_zero_is_zero_and_the_smallest_number_and_nan_are_not(implementation):
    for dtype in FLOATS:
        assert not reductions.any_nonzero([torch.full((100,), -0.0, dtype=dtype)])
        smallest = torch.tensor(torch.finfo(dtype).smallest_normal, dtype=torch.float64) * torch.finfo(dtype).eps
        assert reductions.any_nonzero([smallest.to(dtype)])
        assert reductions.any_nonzero([torch.tensor(math.nan, dtype=dtype)])
