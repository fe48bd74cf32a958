"""Parameter snapshots: the statistics of parameters before an update and of what the update changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonde.statistics.parameter_snapshot import ParameterSnapshot
from sonde.statistics.tensor_statistics_table import StatisticsTable
from statistics_cases import FLOATS, as_numpy, assert_right, each_implementation, noise, reference, synchronized_rows  # noqa: F401


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "layout", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.reshape(2, 5, 8, 10).to(memory_format=torch.channels_last)]
)
def test_take_measures_the_parameters_and_diff_measures_the_update(implementation, dtype, layout):
    tensors = [torch.nn.Parameter(layout(noise(10, 80, seed=i).to(dtype))) for i in range(3)]
    snapshot, rows = ParameterSnapshot(10**6), StatisticsTable(6)
    for step in range(3):
        before = [as_numpy(t).copy() for t in tensors]
        snapshot.take(tensors, rows, 0)
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                tensor += (noise(*tensor.shape, seed=10 * step + i) * 0.1).to(dtype)
        snapshot.diff(tensors, rows, 3)
        found = synchronized_rows(rows)
        for i, tensor in enumerate(tensors):
            assert_right(found[i], reference(before[i]))
            change = as_numpy(tensor) - before[i]
            rounded = reference(change.astype(np.float32) if dtype is not torch.float64 else change)
            assert_right(found[3 + i], rounded | {name: found[3 + i][name] for name in ("min", "max")})
            assert found[3 + i]["max"] == pytest.approx(change.max(), rel=1e-6)
    assert snapshot.num_bytes == sum(t.nbytes for t in tensors)


def test_a_tiny_update_of_a_large_parameter_is_measured(implementation):
    weight = torch.full((5000,), 1000.0)
    snapshot, rows = ParameterSnapshot(10**6), StatisticsTable(1)
    snapshot.take([weight], rows, 0)
    weight[17] = torch.nextafter(weight[17], torch.tensor(2000.0))
    snapshot.diff([weight], rows, 0)
    found = synchronized_rows(rows)[0]
    assert found["zeros"] == 4999
    assert found["l2"] == pytest.approx(found["max"], rel=1e-12)
    assert found["max"] > 0


def test_an_update_too_large_for_float32_is_measured_as_finite(implementation):
    weight = torch.full((100,), -3e38)
    snapshot, rows = ParameterSnapshot(10**6), StatisticsTable(1)
    snapshot.take([weight], rows, 0)
    weight.fill_(3e38)
    snapshot.diff([weight], rows, 0)
    found = synchronized_rows(rows)[0]
    assert found["inf"] == 0
    assert found["mean"] == pytest.approx(6e38)


def test_a_parameter_that_changes_its_memory_layout_is_still_compared_element_by_element(implementation):
    weight = noise(4, 3, 5, 5).float()
    snapshot, rows = ParameterSnapshot(10**6), StatisticsTable(1)
    snapshot.take([weight], rows, 0)
    snapshot.diff([weight.contiguous(memory_format=torch.channels_last)], rows, 0)
    found = synchronized_rows(rows)[0]
    assert (found["num"], found["zeros"], found["l2"]) == (300, 300, 0)
    snapshot.take([weight.contiguous(memory_format=torch.channels_last)], rows, 0)
    snapshot.diff([weight], rows, 0)
    assert synchronized_rows(rows)[0]["zeros"] == 300


def test_parameters_may_appear_disappear_or_change_their_shape(implementation):
    snapshot, rows = ParameterSnapshot(10**6), StatisticsTable(3)
    snapshot.take([torch.ones(3), None, torch.ones(4)], rows, 0)
    snapshot.diff([None, torch.ones(2), torch.ones(5)], rows, 0)
    assert not rows.values.any()
    assert [row["num"] for row in synchronized_rows(rows)] == [0, 0, 0]
    snapshot.take([torch.ones(3), torch.ones(2), torch.ones(5)], rows, 0)
    snapshot.diff([torch.zeros(3), torch.ones(2).half(), torch.ones(5)], rows, 0)
    assert [row["mean"] for row in synchronized_rows(rows)] == [-1, 0, 0]
    assert [row["num"] for row in synchronized_rows(rows)] == [3, 2, 5]
    snapshot.take([torch.ones(3)], rows, 0)
    snapshot.diff([torch.ones(3), torch.ones(3)], rows, 0)
    assert not rows.values[:2].any()


def test_beyond_the_memory_limit_parameters_are_measured_but_not_copied(implementation):
    snapshot, rows = ParameterSnapshot(50), StatisticsTable(2)
    tensors = [torch.ones(10), torch.ones(10)]
    for _ in range(2):
        snapshot.take(tensors, rows, 0)
        assert [row["num"] for row in synchronized_rows(rows)] == [10, 10]
        assert not snapshot.available
        assert "MiB" in snapshot.reason
        assert snapshot.num_bytes == 0
        snapshot.diff(tensors, rows, 0)
        assert not rows.values.any()


def test_copies_are_allocated_once(implementation):
    snapshot, rows = ParameterSnapshot(10**6), StatisticsTable(2)
    tensors = [torch.ones(10), torch.arange(10)]
    snapshot.take(tensors, rows, 0)
    pointers = [copy.data_ptr() for copy in snapshot._copies]
    tensors[0] += 1
    snapshot.take(tensors, rows, 0)
    assert [copy.data_ptr() for copy in snapshot._copies] == pointers
