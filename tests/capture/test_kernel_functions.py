"""The guard, what an update changed, exponents, fingerprints: and the C functions under wrong arguments."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import as_numpy, assert_right, each_way, reference  # noqa: F401

from sonde.events import STATISTICS
from sonde.runlog.format import FramePlan
from sonde.statistics import exponent_histogram, native, reductions
from sonde.statistics.fingerprint import content_hash
from sonde.statistics.snapshot import ParameterSnapshot
from sonde.statistics.table import StatisticsTable

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def rows_of(rows: StatisticsTable) -> list[dict[str, float]]:
    rows.synchronize()
    return [dict(zip(STATISTICS, row)) for row in rows.values.tolist()]


# the guard


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_the_guard_adds_the_squares_of_all(way, dtype, factor):
    tensors = [(noise(n, seed=n) * factor).to(dtype) for n in (1, 5, 64, 4097, 20_000)]
    expected = sum((as_numpy(t) ** 2).sum() for t in tensors)
    assert reductions.check_finite([tensors[0], None, *tensors[1:], torch.empty(0)]) == (pytest.approx(expected, rel=1e-5), -1)


@pytest.mark.parametrize("factor", [1e25, 1e-25, 3e37, 1e-42])
def test_the_guard_is_right_where_float32_squares_are_not(way, factor):
    x = (noise(10_000) * factor).float()
    assert reductions.check_finite([x]) == (pytest.approx((as_numpy(x) ** 2).sum(), rel=1e-5, abs=0), -1)


def test_the_guard_adds_large_and_small_blocks(way):
    x = torch.cat([torch.zeros(5000), torch.full((5000,), 1e-22), torch.full((5000,), 1e-20)])
    assert reductions.check_finite([x]) == (pytest.approx((as_numpy(x) ** 2).sum(), rel=1e-5, abs=0), -1)


def test_finite_float64_whose_squares_overflow_is_not_called_bad(way):
    total, first_bad = reductions.check_finite([torch.full((10,), 1e200, dtype=torch.float64)])
    assert first_bad == -1
    assert total == math.inf


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 4096, 9999])
def test_the_guard_names_the_first_tensor_with_a_bad_value(way, dtype, bad, place):
    tensors = [noise(10_000, seed=i).to(dtype) for i in range(4)]
    tensors[1][place] = bad
    tensors[3][0] = bad
    total, first_bad = reductions.check_finite([None, *tensors])
    assert first_bad == 2
    assert not math.isfinite(total)


def test_the_guard_names_the_first_also_where_ways_are_mixed(way):
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    bad_sparse = torch.sparse_coo_tensor([[0]], [math.inf], (3,), check_invariants=True)
    bad_complex = torch.tensor([complex(math.nan, 1)])
    assert reductions.check_finite([good, bad_sparse, bad])[1] == 1
    assert reductions.check_finite([good, bad, bad_complex])[1] == 1
    assert reductions.check_finite([bad_complex, bad_sparse, bad])[1] == 0
    assert reductions.check_finite([torch.arange(3), good, bad_sparse])[1] == 2


def test_the_guard_of_duplicate_sparse_rows_uses_their_sum(way):
    x = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (5,), check_invariants=True)
    assert reductions.check_finite([x]) == (pytest.approx(18.0), -1)


def test_the_guard_of_an_expanded_tensor_counts_every_element(way):
    assert reductions.check_finite([torch.tensor([2.0]).expand(1000)]) == (pytest.approx(4000.0), -1)
    assert reductions.check_finite([]) == (0.0, -1)


# what an update changed


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "layout", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.reshape(2, 5, 8, 10).to(memory_format=torch.channels_last)]
)
def test_keep_measures_the_tensors_and_change_what_was_done_to_them(way, dtype, layout):
    tensors = [torch.nn.Parameter(layout(noise(10, 80, seed=i).to(dtype))) for i in range(3)]
    kept, rows = ParameterSnapshot(10**6), StatisticsTable(6)
    for step in range(3):
        before = [as_numpy(t).copy() for t in tensors]
        kept.keep(tensors, rows, 0)
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                tensor += (noise(*tensor.shape, seed=10 * step + i) * 0.1).to(dtype)
        kept.change(tensors, rows, 3)
        found = rows_of(rows)
        for i, tensor in enumerate(tensors):
            assert_right(found[i], reference(before[i]))
            change = as_numpy(tensor) - before[i]
            rounded = reference(change.astype(np.float32) if dtype is not torch.float64 else change)
            assert_right(found[3 + i], rounded | {name: found[3 + i][name] for name in ("min", "max")})
            assert found[3 + i]["max"] == pytest.approx(change.max(), rel=1e-6)
    assert kept.num_bytes == sum(t.nbytes for t in tensors)


def test_a_tiny_update_of_a_large_parameter_is_seen(way):
    weight = torch.full((5000,), 1000.0)
    kept, rows = ParameterSnapshot(10**6), StatisticsTable(1)
    kept.keep([weight], rows, 0)
    weight[17] = torch.nextafter(weight[17], torch.tensor(2000.0))
    kept.change([weight], rows, 0)
    found = rows_of(rows)[0]
    assert found["zeros"] == 4999
    assert found["l2"] == pytest.approx(found["max"], rel=1e-12)
    assert found["max"] > 0


def test_a_change_too_large_for_float32_is_not_called_infinite(way):
    weight = torch.full((100,), -3e38)
    kept, rows = ParameterSnapshot(10**6), StatisticsTable(1)
    kept.keep([weight], rows, 0)
    weight.fill_(3e38)
    kept.change([weight], rows, 0)
    found = rows_of(rows)[0]
    assert found["inf"] == 0
    assert found["mean"] == pytest.approx(6e38)


def test_a_parameter_that_changes_its_memory_layout_is_still_compared_element_by_element(way):
    weight = noise(4, 3, 5, 5).float()
    kept, rows = ParameterSnapshot(10**6), StatisticsTable(1)
    kept.keep([weight], rows, 0)
    kept.change([weight.contiguous(memory_format=torch.channels_last)], rows, 0)
    found = rows_of(rows)[0]
    assert (found["num"], found["zeros"], found["l2"]) == (300, 300, 0)
    kept.keep([weight.contiguous(memory_format=torch.channels_last)], rows, 0)
    kept.change([weight], rows, 0)
    assert rows_of(rows)[0]["zeros"] == 300


def test_parameters_that_come_go_or_change_their_shape_are_followed(way):
    kept, rows = ParameterSnapshot(10**6), StatisticsTable(3)
    kept.keep([torch.ones(3), None, torch.ones(4)], rows, 0)
    kept.change([None, torch.ones(2), torch.ones(5)], rows, 0)
    assert not rows.values.any()
    assert [row["num"] for row in rows_of(rows)] == [0, 0, 0]
    kept.keep([torch.ones(3), torch.ones(2), torch.ones(5)], rows, 0)
    kept.change([torch.zeros(3), torch.ones(2).half(), torch.ones(5)], rows, 0)
    assert [row["mean"] for row in rows_of(rows)] == [-1, 0, 0]
    assert [row["num"] for row in rows_of(rows)] == [3, 2, 5]
    kept.keep([torch.ones(3)], rows, 0)
    kept.change([torch.ones(3), torch.ones(3)], rows, 0)
    assert not rows.values[:2].any()


def test_copies_beyond_the_limit_are_not_made_and_the_rest_is_measured(way):
    kept, rows = ParameterSnapshot(50), StatisticsTable(2)
    tensors = [torch.ones(10), torch.ones(10)]
    for _ in range(2):
        kept.keep(tensors, rows, 0)
        assert [row["num"] for row in rows_of(rows)] == [10, 10]
        assert not kept.available
        assert "MiB" in kept.why_not
        assert kept.num_bytes == 0
        kept.change(tensors, rows, 0)
        assert not rows.values.any()


def test_copies_are_made_once(way):
    kept, rows = ParameterSnapshot(10**6), StatisticsTable(2)
    tensors = [torch.ones(10), torch.arange(10)]
    kept.keep(tensors, rows, 0)
    pointers = [copy.data_ptr() for copy in kept._copies]
    tensors[0] += 1
    kept.keep(tensors, rows, 0)
    assert [copy.data_ptr() for copy in kept._copies] == pointers


# exponents


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(width=32), max_size=60), dtype=st.sampled_from([*FLOATS, torch.float8_e5m2]))
def test_exponents_are_the_floor_of_the_logarithm(way, values, dtype):
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    expected: dict[int, int] = {}
    for value in as_numpy(x):
        if value and math.isfinite(value):
            expected[math.frexp(value)[1] - 1] = expected.get(math.frexp(value)[1] - 1, 0) + 1
    which, counts = exponent_histogram.exponents(x)
    assert which == sorted(which)
    assert dict(zip(which, counts)) == expected


def test_exponents_of_float64_are_clamped_and_those_of_expanded_tensors_counted(way):
    assert exponent_histogram.exponents(torch.tensor([1e-300, 1e300, 5e-324, 3.0], dtype=torch.float64)) == ([-149, 1, 127], [2, 1, 1])
    assert exponent_histogram.exponents(torch.tensor([0.0, 8.0]).expand(1000, 2)) == ([3], [1000])
    assert exponent_histogram.exponents(torch.arange(9)) == ([0, 1, 2, 3], [1, 2, 4, 1])
    assert exponent_histogram.exponents(torch.empty(0)) == ([], [])
    assert exponent_histogram.exponents(torch.zeros(10_000)) == ([], [])


# any nonzero


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_any_element_that_is_not_zero_is_found(way, dtype):
    zeros = torch.zeros(5000).to(dtype)
    assert reductions.any_nonzero([None, zeros, torch.empty(0)]) is False
    for place in (0, 1, 64, 4095):
        x = torch.zeros(5000)
        x[place] = 1.0
        assert reductions.any_nonzero([zeros, None, x.to(dtype)]) is True
        assert reductions.any_nonzero([x.to(dtype)], place) is False
        assert reductions.any_nonzero([x.to(dtype)], place + 1) is True


def test_negative_zero_is_zero_and_the_smallest_number_and_nan_are_not(way):
    for dtype in FLOATS:
        assert not reductions.any_nonzero([torch.full((100,), -0.0, dtype=dtype)])
        smallest = torch.tensor(torch.finfo(dtype).smallest_normal, dtype=torch.float64) * torch.finfo(dtype).eps
        assert reductions.any_nonzero([smallest.to(dtype)])
        assert reductions.any_nonzero([torch.tensor(math.nan, dtype=dtype)])


# fingerprints


def test_equal_content_has_equal_fingerprints_whatever_its_layout(way):
    for shape in ((6, 7), (700, 900)):
        x = noise(*shape).float()
        same = [x.clone(), x.t().contiguous().t(), torch.cat([x, x], 1)[:, : shape[1]], torch.nn.Parameter(x), x.as_subclass(torch.Tensor)]
        prints = {content_hash(t) for t in [x, *same]}
        assert len(prints) == 1
        (value,) = prints
        assert 0 <= value < 2**52
        assert int(float(value)) == value


def test_different_content_has_different_fingerprints():
    x = torch.arange(24.0)
    tensors = [x, x + 1, x.reshape(4, 6), x.reshape(6, 4), x.double(), x.long(), x.flip(0), -x, x[:23], torch.zeros(3), torch.zeros(4)]
    tensors += [torch.empty(0), torch.tensor(True), torch.tensor(1 + 2j), torch.tensor(1 - 2j), torch.tensor(1 + 2j).conj().clone() * 2]
    prints = [content_hash(t) for t in tensors]
    assert None not in prints
    assert len(set(prints)) == len(prints)
    assert content_hash(torch.tensor(1 + 2j).conj()) == content_hash(torch.tensor(1 - 2j))
    big = noise(2_000_000).float()
    assert content_hash(big) != content_hash(big + 1)


# the native functions, misused


def extension():
    return pytest.importorskip("sonde.capture._kernel")


@pytest.fixture
def all_native():
    if not native.use_native(True):
        pytest.skip("the native kernel is not built here")


# The last is what `Raises` says for itself.
REFUSALS = (TypeError, ValueError, IndexError, OverflowError, BufferError, ZeroDivisionError)


class Raises(torch.Tensor):
    def __getattribute__(self, name):
        raise ZeroDivisionError(name)


THINGS = [
    None, 0, -1, 2**63, 2**200, 1.5, "x", b"x", [], [None], [1], {}, {1: 2}, object(), int, iter([]),
    torch.ones(2), [torch.ones(2)], (torch.ones(2),) * 3, torch.empty(2, device="meta"), [torch.eye(2).to_sparse()],
    torch.ones(2).as_subclass(Raises), [torch.ones(2).as_subclass(Raises)],
    np.zeros((2, 9)), np.zeros((2, 8)), np.zeros(18), np.zeros((2, 9)).T, np.zeros((4, 9))[::2], np.zeros((0, 9)),
    np.zeros((2, 9), np.float32), np.zeros((2, 9), ">f8"), np.zeros((2, 9), object), np.zeros((2, 9), np.int64),
    memoryview(bytes(144)), bytearray(144),
]  # fmt: skip


@pytest.mark.parametrize("name", ["measure", "measure_one", "keep", "change", "guard", "any_nonzero", "exponents", "setup"])
@pytest.mark.parametrize("by_table", [True, False])
def test_wrong_arguments_are_refused_or_left_to_python(all_native, name, by_table):
    native.use_native(True, by_table=by_table)
    function = getattr(native(), name)
    outcomes = set()
    for num in range(4 if name != "setup" else 3):
        for things in itertools.product(THINGS, repeat=num):
            try:
                function(*things)
                outcomes.add("answered")
            except REFUSALS:
                outcomes.add("refused")
    for things in zip(THINGS, THINGS[1:], THINGS[2:], THINGS[3:]):
        with pytest.raises(REFUSALS):
            function(*things)
    assert "refused" in outcomes
    native.use_native(True)
    assert reductions.check_finite([torch.ones(3)]) == (3.0, -1)


def test_rows_out_of_range_are_refused_and_nothing_is_written(all_native):
    rows = np.full((4, 9), 5.0)
    for first_row, num in ((4, 1), (3, 2), (-1, 1), (0, 5), (2**62, 1)):
        with pytest.raises(IndexError):
            native().measure(rows, first_row, [torch.ones(2)] * num)
    with pytest.raises(ValueError, match="as many copies"):
        native().keep(rows, 0, [torch.ones(2)], [])
    read_only = rows.copy()
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        native().measure_one(read_only, 0, torch.ones(2))
    assert (rows == 5.0).all()
    assert (read_only == 5.0).all()


def test_a_copy_of_another_size_or_type_is_never_written(all_native):
    rows = np.zeros((1, 9))
    others = [torch.zeros(3), torch.zeros(5), torch.zeros(4, dtype=torch.float64)]
    others += [torch.zeros(8)[::2], torch.zeros(1).expand(4), torch.zeros(2, 2)]
    for other in others:
        assert native().keep(rows, 0, [torch.ones(4)], [other]) == [0]
        assert native().change(rows, 0, [torch.ones(4)], [other]) == [0]
        assert not other.any()


def test_attributes_set_on_a_tensor_do_not_mislead_the_kernel(all_native):
    native.use_native(True, by_table=False)
    x = torch.ones(3)
    x.data_ptr = lambda: 8
    x.stride = lambda: (10**12,)
    assert reductions.check_finite([x]) == (3.0, -1)
    native.use_native(True)


def test_a_list_that_shrinks_while_it_is_read_does_no_harm(all_native):
    tensors = [torch.ones(1 << 19) for _ in range(4)]
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            tensors[:] = tensors[:1]
            tensors.extend(torch.ones(1 << 19) for _ in range(3))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(50):
            total, first_bad = reductions.check_finite(tensors)
            assert total % (1 << 19) == 0
            assert first_bad == -1
    finally:
        stop.set()
        thread.join()


def test_eight_threads_measure_into_rows_of_their_own(way):
    rows = StatisticsTable(8)

    def work(row):
        for _ in range(20):
            rows.measure_one(row, torch.full((1 << 18 if way != "torch" else 1000,), float(row)))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row["mean"] for row in rows_of(rows)] == list(range(8))


def test_the_environment_can_switch_the_native_kernel_off():
    code = "from sonde.capture import kernel; import sys; sys.exit(7 if native.ENABLED else 3)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"SONDE_NATIVE": "0"}, check=False).returncode == 3


# records


def _plan(num_sites: int, num_fields: int, *, exact: bool = False) -> FramePlan:
    return FramePlan("some kind", [f"field{i}" for i in range(num_fields)], range(num_sites), exact=exact)


@pytest.mark.skipif(native.encode_frame is native._leave_to_numpy, reason="no native kernel, or not little-endian")
@pytest.mark.parametrize(("num_sites", "num_fields"), [(0, 3), (1, 1), (3, 13), (7, 2), (41, 13), (500, 16)])
def test_a_record_of_the_kernel_is_the_record_of_the_plan(num_sites, num_fields):
    rows = noise(num_sites, num_fields, seed=num_sites).numpy()
    rows[::3] = [math.inf, -math.inf, math.nan, 0.0, -0.0][num_sites % 5]
    plan = _plan(num_sites, num_fields)
    assert native.encode_frame(plan, 2**40, 2**61, rows) == plan.encode(2**40, 2**61, rows)


@pytest.mark.parametrize(
    ("rows", "exact"),
    [
        (np.full((2, 3), 1e300), False), (np.full((2, 3), 1e-300), False), (np.ones((2, 3)), True), (np.ones((3, 2)).T, False),
        (np.ones((2, 3), dtype=np.float32), False), (np.ones((2, 4)), False), (np.ones(6), False), ("text", False),
    ],
    ids=["too large", "too small", "exact", "by columns", "float32", "of another shape", "flat", "no array"],
)  # fmt: skip
def test_what_single_precision_cannot_hold_is_left_to_the_plan(rows, exact):
    assert native.encode_frame(_plan(2, 3, exact=exact), 1, 1, rows) is None
