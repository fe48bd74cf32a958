"""Statistics are right in every precision and for every dtype, shape and layout (R05, R12, R14, R15, R16, R17, R20)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sonde.events import STATISTICS
from sonde.statistics import exponent_histogram, native_extension, reductions, statistics_without_extension
from sonde.statistics.content_hash import content_hash
from sonde.statistics.tensor_statistics_table import StatisticsTable


@pytest.fixture(params=["native", "torch"])
def implementation(request):
    before = native_extension.ENABLED
    if native_extension.use_native(request.param == "native") != (request.param == "native"):
        pytest.skip("the native extension is not built here")
    yield request.param
    native_extension.use_native(before)


def measured(tensor: torch.Tensor) -> dict[str, float]:
    rows = StatisticsTable(1)
    rows.measure_one(0, tensor)
    rows.synchronize()
    assert not rows.unsupported
    return dict(zip(STATISTICS, rows.values[0].tolist()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1e-4, 1.0, 300.0])
def test_r05_statistics_are_right_to_1e_5_in_low_precision_and_under_autocast(implementation, dtype, factor):
    x = (torch.from_numpy(np.random.default_rng(0).standard_normal(30_000)) * factor + factor).to(dtype)
    exact = x.double().numpy()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measured(x)
        total, first_bad = reductions.check_finite([x])
    assert found["mean"] == pytest.approx(exact.mean(), rel=1e-5, abs=0)
    assert found["std"] == pytest.approx(exact.std(), rel=1e-5, abs=0)
    assert found["l2"] == pytest.approx(math.sqrt((exact**2).sum()), rel=1e-5, abs=0)
    assert (found["min"], found["max"]) == (exact.min(), exact.max())
    assert (total, first_bad) == (pytest.approx((exact**2).sum(), rel=1e-5, abs=0), -1)


def test_r12_statistics_are_those_of_the_moment_of_measuring(implementation):
    dtype = torch.float32 if implementation == "native" else torch.int64
    x = torch.randint(-5, 5, (100,), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.double().numpy().copy()
    rows = StatisticsTable(1)
    rows.measure_one(0, x)
    x.fill_(3)  # an in-place operation before synchronize
    rows.synchronize()
    assert rows.values[0, 1] == pytest.approx(expected.mean())


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def test_r14_the_list_of_dtypes_is_not_empty():
    assert {torch.float8_e4m3fn, torch.qint8, torch.uint64, torch.complex32} <= set(DTYPES)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, on making tensors of experimental dtypes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_r14_every_dtype_gives_right_statistics_or_a_reason(implementation, dtype):
    try:
        x = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int64).to(dtype)
    except (RuntimeError, NotImplementedError):
        if "q" in str(dtype):
            x = torch._empty_affine_quantized([5], scale=1.0, zero_point=0, dtype=dtype)
        else:
            x = torch.empty(5, dtype=dtype)
    rows = StatisticsTable(1)
    rows.measure_one(0, x)
    rows.synchronize()
    reductions.check_finite([x])
    reductions.any_nonzero([x])
    exponent_histogram.exponents(x)
    content_hash(x)
    if statistics_without_extension.unsupported_reason(x) is None:
        zero = 2.0**-127 if "e8m0" in str(dtype) else 0.0  # that dtype has no zero
        exact = np.array([zero, 1, 1 if dtype is torch.bool else 2, zero, 1])
        assert not rows.unsupported
        assert rows.values[0, 1] == pytest.approx(exact.mean())
        assert rows.values[0, 2] == pytest.approx(exact.std())
        assert rows.values[0, 6] == (exact == 0).sum()
    else:
        assert rows.unsupported == {0: statistics_without_extension.unsupported_reason(x)}
        assert not rows.values.any()


SHAPES = {
    "empty": torch.empty(0),
    "empty in one dimension": torch.empty(3, 0, 2),
    "no dimensions": torch.tensor(3.0),
    "one element": torch.ones(1, 1, 1),
    "64 dimensions": torch.ones([1] * 63 + [2]),
    "expanded": torch.ones(1, 2).expand(1000, 2),
    "expanded beyond memory": torch.ones(1).expand(10**15),
    "transposed": torch.ones(3, 4).t(),
    "with holes": torch.ones(30, 4)[::3, ::2],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_r15_every_shape_is_measured_and_an_empty_tensor_is_finite(implementation, shape):
    x = SHAPES[shape]
    found = measured(x)
    assert found["num"] == x.numel()
    assert found["nan"] == found["inf"] == 0
    assert found["mean"] == (float(x.reshape(-1)[0]) if 0 < x.numel() < 10**6 else 1.0 if x.numel() else 0.0)
    total, first_bad = reductions.check_finite([x])
    assert first_bad == -1
    assert math.isfinite(total)
    assert exponent_histogram.exponents(x) is not None
    if x.numel() < 10**6:
        assert content_hash(x) is not None


def test_r16_one_non_finite_value_among_17_million_is_counted_and_does_not_spoil_the_rest(implementation):
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(17_000_001, dtype=np.float32)) * 0.01 + 1000
    x[12_345_678] = math.nan
    x[-1] = math.inf
    exact = x[torch.isfinite(x)].double().numpy()
    found = measured(x)
    assert (found["num"], found["nan"], found["inf"]) == (17_000_001, 1, 1)
    assert found["mean"] == pytest.approx(exact.mean(), rel=1e-9)
    assert found["std"] == pytest.approx(exact.std(), rel=1e-5, abs=0)
    assert found["l2"] == pytest.approx(np.linalg.norm(exact), rel=1e-5, abs=0)
    assert (found["min"], found["max"]) == (exact.min(), exact.max())
    assert reductions.check_finite([torch.ones(3), x])[1] == 1
    assert sum(exponent_histogram.exponents(x)[1]) == 16_999_999
    assert reductions.check_finite([x[:12_000_000]]) == (pytest.approx((x[:12_000_000].double() ** 2).sum().item(), rel=1e-5, abs=0), -1)


def test_r17_gradients_of_a_sparse_embedding_have_the_right_norm_and_are_not_changed(implementation):
    table = torch.nn.Embedding(1000, 4, sparse=True)
    table(torch.tensor([3, 3, 3, 7])).sum().backward()
    grad = table.weight.grad
    assert not grad.is_coalesced()
    found = measured(grad)
    assert found["l2"] == pytest.approx(math.sqrt(4 * 9 + 4))  # of the stored values alone it would be 4
    assert (found["num"], found["zeros"], found["max"]) == (4000, 3992, 3)
    assert found["mean"] == pytest.approx(16 / 4000)
    assert reductions.check_finite([grad]) == (pytest.approx(40.0), -1)
    assert not grad.is_coalesced()
    assert grad._nnz() == 4


def test_r20_a_missing_gradient_is_a_row_of_zeros(implementation):
    rows = StatisticsTable(2)
    rows.values[:] = 9.0
    rows.measure(0, [None, torch.ones(2)])
    rows.synchronize()
    assert not rows.values[0].any()
    assert rows.values[1, 0] == 2
    assert reductions.check_finite([None, torch.ones(2)]) == (pytest.approx(2.0), -1)
