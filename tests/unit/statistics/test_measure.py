"""The statistics of a tensor, by every implementation, against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonde.events import STATISTICS
from sonde.statistics import native_extension
from sonde.statistics.tensor_statistics_table import StatisticsTable
from statistics_cases import FLOATS, as_numpy, assert_right, check, each_implementation, measured, noise, reference  # noqa: F401

SIZES = [1, 2, 3, 7, 15, 16, 17, 31, 63, 64, 65, 127, 129, 4095, 4096, 4097, 8193, 70_001]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num", SIZES)
def test_every_size_and_floating_dtype_is_measured_right(implementation, num, dtype):
    check((noise(num, seed=num) * 3 + 0.5).to(dtype))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, 3:40],
        lambda x: x[::3, ::2],
        lambda x: x[5],
        lambda x: x[:, 7],
        lambda x: x[3, 4],
        lambda x: x[:1, :1],
        lambda x: x.reshape(4, 4, 16, 16).permute(2, 0, 3, 1),
        lambda x: x.reshape(2, 8, 16, 16).contiguous(memory_format=torch.channels_last),
        lambda x: x.reshape(2, 8, 16, 16).contiguous(memory_format=torch.channels_last)[:, 1:5],
        lambda x: x[:1].expand(50, x.shape[1]),
        lambda x: x[:, :1].expand(x.shape[0], 100),
        lambda x: x[:, :1, None].expand(x.shape[0], 10, 20).transpose(0, 1),
        lambda x: x.as_strided((20, 30), (1, 1)),
        lambda x: x.reshape(-1).unfold(0, 10, 3),
        lambda x: x[:, :0],
        lambda x: x.flatten()[1:],
        lambda x: x.reshape([1] * 60 + [x.numel()]),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strides_do_not_change_the_statistics(implementation, make, dtype):
    x = noise(64, 64).to(dtype)
    x[0, 0] = 0.0
    check(make(x))


CONTENTS = {
    "mean much larger than std": lambda n: 1000 + 0.01 * noise(n),
    "huge": lambda n: 1e30 * noise(n),
    "tiny": lambda n: 1e-30 * noise(n),
    "denormal": lambda n: 1e-42 * noise(n),
    "near the end of float32": lambda n: 3e38 * torch.sign(noise(n)),
    "one outlier": lambda n: torch.cat([1e-3 * noise(n - 1), torch.tensor([1e6], dtype=torch.float64)]),
    "one extreme outlier": lambda n: torch.cat([noise(n - 1), torch.tensor([-1e35], dtype=torch.float64)]),
    "scales mixed over blocks": lambda n: noise(n) * 10.0 ** torch.linspace(-30, 30, n, dtype=torch.float64),
    "constant": lambda n: torch.full((n,), 0.1, dtype=torch.float64),
    "constant and tiny": lambda n: torch.full((n,), 1e-35, dtype=torch.float64),
    "zeros": lambda n: torch.zeros(n, dtype=torch.float64),
    "zeros of both signs": lambda n: torch.zeros(n, dtype=torch.float64).copysign(noise(n)),
    "mostly zeros": lambda n: noise(n) * (torch.arange(n) % 7 == 0),
    "cancelling": lambda n: torch.cat([noise(n // 2), -noise(n // 2)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num", [64, 10_000])
@pytest.mark.parametrize("content", CONTENTS)
def test_extreme_values_are_measured_right(implementation, content, num, dtype):
    check(CONTENTS[content](num).to(dtype))


@pytest.mark.parametrize("factor", [1e300, 1e-300, 1e160, 1e-160, 5e-324])
def test_float64_values_with_squares_beyond_float64_are_measured_right(implementation, factor):
    check(noise(5000) * factor)


def test_a_constant_tensor_has_no_deviation(implementation):
    for value in (0.1, 1e30, 1e-30, -7.3):
        assert measured(torch.full((9999,), value))["std"] <= 1e-15 * abs(value)
        assert measured(torch.full((9999,), value))["mean"] == pytest.approx(np.float32(value), rel=1e-12)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 63, 64, 4096, 9998, slice(0, 5000), slice(None)], ids=str)
def test_statistics_are_over_the_finite_elements_and_the_others_are_counted(implementation, where, bad, dtype):
    x = (2 + noise(9999)).to(dtype)
    x[where] = bad
    check(x)


def test_nan_and_infinite_values_are_counted_separately(implementation):
    x = noise(100).float()
    x[:3], x[3:5], x[5:9] = math.nan, math.inf, -math.inf
    assert measured(x)["nan"] == 3
    assert measured(x)["inf"] == 6
    check(x)


def test_a_signalling_nan_is_a_nan(implementation):
    bits = torch.tensor([0x7F800001, 0x7FC00000, -1, 0x7F800000, 0x3F800000], dtype=torch.int32)
    found = measured(bits.view(torch.float32))
    assert (found["nan"], found["inf"], found["mean"]) == (3, 1, 1.0)


def test_every_float16_and_bfloat16_is_read_right(implementation):
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        for chunk in (every, *every.split(1009)):
            check(chunk)


@pytest.mark.parametrize("empty", [None, torch.empty(0), torch.empty(3, 0, 5, dtype=torch.float64), torch.empty(0, dtype=torch.int64)])
def test_a_missing_or_empty_tensor_gives_a_row_of_zeros(implementation, empty):
    assert set(measured(empty).values()) == {0.0}


def test_each_element_of_an_expanded_tensor_is_read_once(implementation):
    found = measured(torch.tensor([1.0, -3.0, 0.0]).expand(10**6, 10**6, 3))
    assert found["num"] == 3e12
    assert found["zeros"] == 1e12
    assert found["l2"] == pytest.approx(math.sqrt(10) * 1e6)
    assert found["std"] == pytest.approx(np.std([1, -3, 0]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=200),
    repeat=st.sampled_from([1, 3, 50]),
    dtype=st.sampled_from(FLOATS),
)
def test_arbitrary_values_are_measured_right(implementation, values, repeat, dtype):
    check(torch.tensor(values * repeat, dtype=torch.float32).to(dtype))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arbitrary_views_are_measured_right(implementation, data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=5))
    stride = data.draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    offset = data.draw(st.integers(0, 20))
    dtype = data.draw(st.sampled_from(FLOATS))
    check(noise(1000).to(dtype).as_strided(shape, stride, offset))


def test_native_and_torch_give_the_same_numbers():
    rows = {}
    tensors = [make(5000).float() for make in CONTENTS.values()]
    for on in (True, False):
        if native_extension.use_native(on) is not on:
            pytest.skip("the native extension is not built here")
        rows[on] = StatisticsTable(len(tensors))
        rows[on].measure(0, tensors)
        rows[on].synchronize()
    native_extension.use_native(True)
    for native_row, torch_row in zip(rows[True].values, rows[False].values):
        assert_right(dict(zip(STATISTICS, native_row.tolist())), dict(zip(STATISTICS, torch_row.tolist())))


def test_each_tensor_of_a_list_gets_its_own_row(implementation):
    tensors = [noise(7).float(), None, torch.arange(5), noise(3, 3).half(), torch.empty(0), noise(100).bfloat16()]
    rows = StatisticsTable(8)
    rows.measure(1, tensors)
    rows.synchronize()
    for row, tensor in zip(rows.values[1:7], tensors):
        expected = dict.fromkeys(STATISTICS, 0.0) if tensor is None else reference(as_numpy(tensor))
        assert_right(dict(zip(STATISTICS, row.tolist())), expected)
    assert not rows.values[[0, 7]].any()


def test_a_row_holds_the_last_measurement(implementation):
    rows = StatisticsTable(1)
    rows.measure_one(0, torch.arange(10))  # by torch: pending until synchronize
    rows.measure_one(0, torch.ones(3))
    rows.synchronize()
    assert rows.values[0, 0] == 3
    rows.measure(0, [torch.arange(10)])
    rows.measure(0, [None])
    rows.synchronize()
    assert not rows.values.any()


def test_synchronizing_twice_changes_nothing(implementation):
    rows = StatisticsTable(1)
    rows.measure_one(0, torch.arange(10))
    rows.synchronize()
    before = rows.values.copy()
    rows.synchronize()
    assert (rows.values == before).all()
