"""The C extension itself: wrong arguments, threads, frame records, and how it is switched off."""

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

from sonde.runlog.record_format import FramePlan
from sonde.statistics import native_extension, reductions
from sonde.statistics.tensor_statistics_table import StatisticsTable
from statistics_cases import each_implementation, noise, synchronized_rows  # noqa: F401

# arguments


@pytest.fixture
def extension():
    if not native_extension.use_native(True):
        pytest.skip("the native extension is not built here")
    return native_extension.extension


# The last one is raised by `Raises`.
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


@pytest.mark.parametrize(
    "name",
    [
        "measure", "measure_one", "snapshot", "diff", "check_finite", "check_finite_rows", "any_nonzero", "exponents", "read_element",
        "setup",
    ],
)  # fmt: skip
@pytest.mark.parametrize("use_dlpack", [True, False])
def test_wrong_arguments_raise_or_are_not_handled(extension, name, use_dlpack):
    native_extension.use_native(True, use_dlpack=use_dlpack)
    function = getattr(extension, name)
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
    native_extension.use_native(True)
    assert reductions.check_finite([torch.ones(3)]) == (3.0, -1)


def test_rows_out_of_range_raise_and_nothing_is_written(extension):
    rows = np.full((4, 9), 5.0)
    for first_row, num in ((4, 1), (3, 2), (-1, 1), (0, 5), (2**62, 1)):
        with pytest.raises(IndexError):
            extension.measure(rows, first_row, [torch.ones(2)] * num)
    with pytest.raises(ValueError, match="as many copies"):
        extension.snapshot(rows, 0, [torch.ones(2)], [])
    read_only = rows.copy()
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        extension.measure_one(read_only, 0, torch.ones(2))
    assert (rows == 5.0).all()
    assert (read_only == 5.0).all()


def test_a_copy_of_another_size_or_type_is_never_written(extension):
    rows = np.zeros((1, 9))
    others = [torch.zeros(3), torch.zeros(5), torch.zeros(4, dtype=torch.float64)]
    others += [torch.zeros(8)[::2], torch.zeros(1).expand(4), torch.zeros(2, 2)]
    for other in others:
        assert extension.snapshot(rows, 0, [torch.ones(4)], [other]) == [0]
        assert extension.diff(rows, 0, [torch.ones(4)], [other]) == [0]
        assert not other.any()


def test_attributes_set_on_a_tensor_do_not_mislead_the_extension(extension):
    native_extension.use_native(True, use_dlpack=False)
    x = torch.ones(3)
    x.data_ptr = lambda: 8
    x.stride = lambda: (10**12,)
    assert reductions.check_finite([x]) == (3.0, -1)
    native_extension.use_native(True)


def test_a_list_may_shrink_while_it_is_read(extension):
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


def test_eight_threads_measure_into_separate_rows(implementation):
    rows = StatisticsTable(8)

    def work(row):
        for _ in range(20):
            rows.measure_one(row, torch.full((1 << 18 if implementation != "torch" else 1000,), float(row)))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row["mean"] for row in synchronized_rows(rows)] == list(range(8))


def test_an_environment_variable_disables_the_extension():
    code = "from sonde.statistics import native_extension; import sys; sys.exit(7 if native_extension.ENABLED else 3)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"SONDE_NATIVE": "0"}, check=False).returncode == 3


# frame records


def _plan(num_sites: int, num_fields: int, *, exact: bool = False) -> FramePlan:
    return FramePlan("some kind", [f"field{i}" for i in range(num_fields)], range(num_sites), exact=exact)


@pytest.mark.skipif(native_extension.encode_frame is native_extension._not_encoded, reason="no native extension, or not little-endian")
@pytest.mark.parametrize(("num_sites", "num_fields"), [(0, 3), (1, 1), (3, 13), (7, 2), (41, 13), (500, 16)])
def test_the_extension_encodes_the_same_record_as_the_plan(num_sites, num_fields):
    rows = noise(num_sites, num_fields, seed=num_sites).numpy()
    rows[::3] = [math.inf, -math.inf, math.nan, 0.0, -0.0][num_sites % 5]
    plan = _plan(num_sites, num_fields)
    assert native_extension.encode_frame(plan, 2**40, 2**61, rows) == plan.encode(2**40, 2**61, rows)


@pytest.mark.parametrize(
    ("rows", "exact"),
    [
        (np.full((2, 3), 1e300), False), (np.full((2, 3), 1e-300), False), (np.ones((2, 3)), True), (np.ones((3, 2)).T, False),
        (np.ones((2, 3), dtype=np.float32), False), (np.ones((2, 4)), False), (np.ones(6), False), ("text", False),
    ],
    ids=["too large", "too small", "exact", "by columns", "float32", "of another shape", "flat", "no array"],
)  # fmt: skip
def test_frames_that_single_precision_cannot_hold_are_not_handled(rows, exact):
    assert native_extension.encode_frame(_plan(2, 3, exact=exact), 1, 1, rows) is None
