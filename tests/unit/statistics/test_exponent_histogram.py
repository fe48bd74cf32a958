"""Histograms of exponents, by every implementation."""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonde.statistics import exponent_histogram
from statistics_cases import FLOATS, as_numpy, each_implementation  # noqa: F401


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(width=32), max_size=60), dtype=st.sampled_from([*FLOATS, torch.float8_e5m2]))
def test_exponents_are_the_floor_of_the_binary_logarithm(implementation, values, dtype):
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    expected: dict[int, int] = {}
    for value in as_numpy(x):
        if value and math.isfinite(value):
            expected[math.frexp(value)[1] - 1] = expected.get(math.frexp(value)[1] - 1, 0) + 1
    which, counts = exponent_histogram.exponents(x)
    assert which == sorted(which)
    assert dict(zip(which, counts)) == expected


def test_exponents_of_float64_are_clamped_and_expanded_elements_count_each_time(implementation):
    assert exponent_histogram.exponents(torch.tensor([1e-300, 1e300, 5e-324, 3.0], dtype=torch.float64)) == ([-149, 1, 127], [2, 1, 1])
    assert exponent_histogram.exponents(torch.tensor([0.0, 8.0]).expand(1000, 2)) == ([3], [1000])
    assert exponent_histogram.exponents(torch.arange(9)) == ([0, 1, 2, 3], [1, 2, 4, 1])
    assert exponent_histogram.exponents(torch.empty(0)) == ([], [])
    assert exponent_histogram.exponents(torch.zeros(10_000)) == ([], [])
