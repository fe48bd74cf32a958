"""Statistics of every kind of tensor, compared with numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sonde.errors import SondeError  # noqa: E402
from sonde.tools.tensors.describe_tensor import PERCENTILES, as_tensor, describe, elements, fast_statistics  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.torch


def noise(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape))


def dense(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.to(torch.float64)
    return tensor.numpy()


def assert_right(tensor: torch.Tensor) -> None:
    stats, values = describe(tensor), dense(tensor)
    finite = values[np.isfinite(values)]
    assert stats.unsupported == ""
    assert stats.shape == tuple(tensor.shape)
    counts = (stats.num_elements, stats.num_zeros, stats.num_nan, stats.num_inf)
    assert counts == (values.size, (values == 0).sum(), np.isnan(values).sum(), np.isinf(values).sum())
    if not finite.size:
        assert all(math.isnan(number) for number in (stats.mean, stats.std, stats.min, stats.max))
        assert (stats.l1_norm, stats.l2_norm, stats.histogram) == (0.0, 0.0, None)
        return
    right = {
        "mean": finite.mean(),
        "std": finite.std(),
        "min": finite.min(),
        "max": finite.max(),
        "l1_norm": np.abs(finite).sum(),
        "l2_norm": math.sqrt((finite * finite).sum()),
    }
    scale = np.abs(finite).max()
    for name, expected in right.items():
        assert getattr(stats, name) == pytest.approx(expected, rel=1e-5, abs=1e-12 * scale), name
    for percent in PERCENTILES:
        assert stats.percentiles[percent] == pytest.approx(np.percentile(finite, percent), rel=1e-5, abs=1e-12 * scale), percent
    assert stats.histogram.counts.sum() == finite.size
    if finite.min() < finite.max():
        counts, edges = np.histogram(finite, 64)
        np.testing.assert_array_equal(stats.histogram.counts, counts)
        np.testing.assert_allclose(stats.histogram.edges, edges, rtol=1e-12, atol=1e-15 * scale)


FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
WHOLE = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_of_every_floating_dtype_are_correct(dtype):
    assert_right((noise(41, 53) * 3 + 0.5).to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", WHOLE)
def test_statistics_of_every_integer_dtype_are_correct(dtype):
    assert_right((noise(41, 53) * 3).abs().to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_the_smallest_integer_has_a_magnitude_although_it_has_no_opposite(dtype):
    low = torch.iinfo(getattr(torch, dtype)).min
    assert fast_statistics(torch.tensor([low, 1], dtype=getattr(torch, dtype))).l1 == pytest.approx(1 - low)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_described_by_their_absolute_values(dtype):
    assert_right(torch.complex(noise(30, 20), noise(30, 20) * 2).to(getattr(torch, dtype)))


KINDS = {
    "empty": lambda x: x[:0],
    "without dimensions": lambda x: x[0, 0],
    "one element": lambda x: x[:1, :1],
    "expanded": lambda x: x[:1].expand(50, x.shape[1]),
    "transposed": lambda x: x.t(),
    "a slice with steps": lambda x: x[::3, ::2],
    "requires grad": lambda x: x.clone().requires_grad_(),
    "not a leaf": lambda x: x.clone().requires_grad_() * 2,
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "constant": lambda x: torch.full_like(x, 0.1),
    "zeros": torch.zeros_like,
    "all nan": lambda x: torch.full_like(x, math.nan),
    "some bad": lambda x: x.masked_fill(x > 1, math.nan).masked_fill(x < -1, -math.inf),
    "sparse coo": lambda x: (x * (x > 1)).to_sparse(),
    "sparse coo without values": lambda x: torch.zeros_like(x).to_sparse(),
    "sparse coo, negative": lambda x: (x * (x < -1)).to_sparse(),
    "sparse csr": lambda x: (x * (x.abs() > 1)).to_sparse_csr(),
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "negated view": lambda x: torch.complex(x, x).conj().imag,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_every_kind_of_tensor_are_correct(kind):
    assert_right(KINDS[kind](noise(40, 50).float()))


def test_equal_indices_of_a_sparse_gradient_are_added_before_it_is_described():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert not embedding.weight.grad.is_coalesced()
    assert_right(embedding.weight.grad)
    assert not embedding.weight.grad.is_coalesced()


def test_an_inference_tensor_is_described_inside_and_outside_of_inference_mode():
    with torch.inference_mode():
        x = noise(100)
        assert_right(x)
    assert_right(x)


def test_statistics_of_seventeen_million_elements_are_correct():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(17_000_000, dtype=np.float32))
    x[7] = math.inf
    assert_right(x)


@pytest.mark.parametrize("factor", [1e-45, 1e-310, 1e300, 1e308])
def test_statistics_at_the_limits_of_float64_are_correct(factor):
    x = (noise(1000).clamp(-1.7, 1.7) * factor).double()
    stats, exact = describe(x), x.numpy().astype(np.longdouble)
    assert stats.l2_norm == pytest.approx(float(np.sqrt((exact * exact).sum())), rel=1e-5)
    assert stats.percentiles[75] == pytest.approx(np.percentile(x.numpy(), 75), rel=1e-5)
    assert stats.histogram.counts.sum() == 1000
    assert (stats.histogram.edges[0], stats.histogram.edges[-1]) == (x.min(), x.max())


def test_neighboring_float64_numbers_get_as_many_bins_as_possible():
    stats = describe([1.0, math.nextafter(1.0, 2.0)])
    assert stats.histogram.counts.tolist() == [1, 1] or stats.histogram.counts.tolist() == [2]


QUANTISED = "ignore:.*quantiz.*"


@pytest.mark.filterwarnings(QUANTISED)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(3, device="meta"), "meta tensors hold no values"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized tensors are not measured"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "lazy parameters have no values"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested and jagged"),
    ],
    ids=["meta", "quantised", "lazy", "jagged"],
)
def test_a_tensor_that_cannot_be_measured_has_a_reason_and_no_values(make, why):
    tensor = make()
    for found in (fast_statistics(tensor), describe(tensor)):
        assert why in found.unsupported
        assert math.isnan(found.mean)
        assert math.isnan(found.max)
    assert not fast_statistics(tensor).is_finite
    with pytest.raises(SondeError, match=why):
        elements(tensor)


def test_a_tensor_inside_vmap_is_unsupported():
    captured = []
    torch.vmap(lambda x: (captured.append(fast_statistics(x)), x)[1])(torch.ones(3, 2))
    assert "torch.func" in captured[0].unsupported


@pytest.mark.parametrize(
    ("value", "mean"),
    [
        (3, 3),
        (2.5, 2.5),
        (True, 1),
        ([1, 2, 6], 3),
        ([[1.0, 2.0], [3.0, 4.0]], 2.5),
        ((1, 2), 1.5),
        ([torch.tensor(1.0), torch.tensor(2.0)], 1.5),
        (np.arange(5)[::-1], 2),
        (np.arange(5, dtype=">f4"), 2),
        (np.float16(0.5), 0.5),
        (np.arange(4, dtype=np.uint16), 1.5),
        (np.longdouble(2), 2),
    ],
    ids=repr,
)
def test_arrays_lists_and_numbers_are_described_like_tensors(value, mean):
    assert fast_statistics(value).mean == mean
    assert describe(value).mean == mean


def test_a_read_only_array_is_described():
    array = np.ones(4)
    array.flags.writeable = False
    assert describe(array).l1_norm == 4


def test_an_empty_list_has_no_values_and_raises_nothing():
    found = fast_statistics([])
    assert (found.num, found.nan, found.inf, found.mean_abs, found.zero_share) == (0, 0, 0, 0.0, 0.0)
    assert found.is_finite


@pytest.mark.parametrize("value", ["text", None, object(), {"a": 1}, [1, [2, 3]], ["a"], [None]], ids=lambda value: str(value)[:9])
def test_a_value_that_is_not_a_tensor_raises_a_clear_error(value):
    with pytest.raises(SondeError, match=r"not a tensor|cannot be converted to a tensor"):
        describe(value)


@pytest.mark.parametrize("bins", [0, -3, 2.5, "many", True, 10**9])
def test_an_invalid_number_of_bins_raises_a_clear_error(bins):
    with pytest.raises(SondeError, match="bins="):
        describe([1, 2], bins=bins)


def test_as_tensor_neither_changes_nor_copies_a_tensor():
    x = noise(10).float().requires_grad_()
    before, version = x.detach().clone(), x._version
    assert as_tensor(x).data_ptr() == x.data_ptr()
    describe(x)
    assert torch.equal(x, before)
    assert x._version == version
    assert x.grad_fn is None


def test_outliers_are_counted_and_the_largest_are_listed_with_their_index():
    x = noise(100, 100)
    x[3, 7], x[99, 0] = 50.0, -80.0
    stats = describe(x)
    assert stats.num_outliers == 2
    assert [(one.index, one.value) for one in stats.outliers] == [((99, 0), -80.0), ((3, 7), 50.0)]


def test_if_most_elements_are_equal_the_others_are_not_all_outliers():
    x = torch.zeros(1000)
    x[:100] = noise(100).float()
    assert describe(x).num_outliers == 0
    x[0] = 1e3
    assert describe(x).num_outliers == 1


def test_extreme_numbers_are_those_near_the_limits_of_the_dtype():
    x = torch.tensor([1.0, 0.0, 60000.0, -9000.0, 6e-8, -1e-5, 8000.0], dtype=torch.float16)
    assert describe(x).num_extreme == 4
    assert describe(x.float()).num_extreme == 0
    assert describe(torch.tensor([2**62])).num_extreme == 0


def test_no_randomness_is_used():
    before = torch.get_rng_state()
    describe(noise(1000))
    assert torch.equal(before, torch.get_rng_state())


def test_autocast_and_default_dtypes_do_not_change_the_statistics():
    x = noise(1000).float()
    right = fast_statistics(x)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fast_statistics(x) == right
    finally:
        torch.set_default_dtype(torch.float32)
