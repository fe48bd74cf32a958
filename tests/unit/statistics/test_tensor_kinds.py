"""Every kind of tensor gives right statistics or a reason, never an exception, and is not changed."""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sonde.events import STATISTICS
from sonde.statistics import exponent_histogram, reductions, statistics_without_extension
from sonde.statistics.content_hash import content_hash
from sonde.statistics.find_tensors import read_scalar
from sonde.statistics.parameter_snapshot import ParameterSnapshot
from sonde.statistics.tensor_statistics_table import StatisticsTable
from statistics_cases import check, each_implementation, measured  # noqa: F401

INTEGERS = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_measured_right(implementation, dtype):
    check(torch.arange(100, dtype=torch.int64).to(dtype))


def test_booleans_are_measured_as_0_and_1(implementation):
    found = measured(torch.tensor([True, False, True, True]))
    assert (found["mean"], found["zeros"], found["max"]) == (0.75, 1, 1)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_float8_is_measured_right(implementation, dtype):
    check(torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_measured_by_their_absolute_value(implementation, dtype):
    x = torch.tensor([3 + 4j, 0, -5, complex("nan"), complex(0, float("inf"))], dtype=torch.complex64).to(dtype)
    found = measured(x)
    assert (found["max"], found["zeros"], found["nan"], found["inf"], found["num"]) == (5, 1, 1, 1, 5)
    assert found["l2"] == pytest.approx(50**0.5)


def test_the_imaginary_part_of_a_conjugate_is_negated(implementation):
    for num in (1, 5):
        imaginary = torch.full((num,), 2 + 3j).conj().imag
        assert imaginary.is_neg()
        assert measured(imaginary)["mean"] == -3.0
        assert reductions.check_finite([imaginary]) == (pytest.approx(9.0 * num), -1)


def test_parameters_and_tensors_with_a_graph_are_measured(implementation):
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    check(weight)
    out = (weight * 2).relu()
    version = out._version
    check(out)
    assert out.requires_grad
    assert out._version == version


def test_sparse_tensors_are_measured_like_dense_ones(implementation):
    index = torch.tensor([[0, 2, 2, 0], [1, 1, 1, 0]])
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0, -5.0, 0.0], dtype=dtype), (4, 3), check_invariants=True)
        check(x)
        assert not x.is_coalesced(), "the user's tensor was changed"
        assert x._nnz() == 4
        check(x.coalesce())


def test_a_hybrid_sparse_tensor_and_an_empty_one_are_measured_right(implementation):
    values = torch.arange(6.0).reshape(2, 3) - 7
    check(torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (5, 3), check_invariants=True))
    check(torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (5, 3), check_invariants=True))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("how", ["to_sparse_csr", "to_sparse_csc"])
def test_compressed_sparse_tensors_are_measured_right(implementation, how):
    dense = torch.tensor([[0.0, 2.0, 0.0], [-1.0, 0.0, 3.0]])
    check(getattr(dense, how)())


class Named(torch.Tensor):
    """A subclass with ordinary memory and its own __torch_function__."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.__repr__:
            raise AssertionError("Sonde called into the user's subclass")
        return super().__torch_function__(func, types, args, kwargs)


def test_a_subclass_with_ordinary_memory_is_measured_without_calling_its_torch_function(implementation):
    x = torch.arange(5.0).as_subclass(Named)
    assert measured(x)["mean"] == 2.0


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("not implemented")


class Wrapped(torch.Tensor):
    """Holds another tensor and computes with it, without memory of its own."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda one: one.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))


def test_a_class_with_its_own_dispatch_is_measured_by_torch_operations(implementation):
    plain = torch.tensor([[1.0, -2.0, 0.0], [float("nan"), float("inf"), 5.0]])
    rows = StatisticsTable(3)
    rows.measure(0, [Wrapped(plain), plain, torch.nn.Parameter(Wrapped(torch.ones(4)))])
    rows.synchronize()
    assert rows.unsupported == {}
    assert rows.values[0].tolist() == pytest.approx(rows.values[1].tolist())
    assert rows.values[2, 0] == 4
    assert reductions.check_finite([torch.ones(2), Wrapped(plain)])[1] == 1
    assert reductions.check_finite([Wrapped(torch.full((2,), 3.0)), None]) == (pytest.approx(18.0), -1)
    assert read_scalar(Wrapped(torch.tensor(2.5))) == 2.5
    assert reductions.any_nonzero([Wrapped(torch.zeros(3))]) is False
    assert reductions.any_nonzero([Wrapped(torch.ones(3))]) is True


def test_the_update_of_a_class_with_its_own_dispatch_is_measured(implementation):
    weight, rows, snapshot = Wrapped(torch.ones(3)), StatisticsTable(1), ParameterSnapshot(1000)
    snapshot.take([weight], rows, 0)
    weight.held.add_(2.0)
    snapshot.diff([weight], rows, 0)
    rows.synchronize()
    assert rows.values[0, STATISTICS.index("mean")] == 2.0


def test_where_users_code_must_not_run_a_class_with_its_own_dispatch_is_not_read(implementation):
    total, bad = reductions.check_finite([Wrapped(torch.full((2,), float("nan")))], runs_users_dispatch=False)
    assert math.isnan(total)  # not 0, which would mean that the gradients are empty
    assert bad == -1
    assert reductions.check_finite([Wrapped(torch.ones(2)), torch.ones(2)], runs_users_dispatch=False) == (pytest.approx(2.0), -1)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def freed() -> torch.Tensor:
    whole = torch.ones(1000)
    view = whole[100:200]
    whole.untyped_storage().resize_(0)
    return view


UNSUPPORTED = {
    "quantized": quantized,
    "nested": nested,
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "freed": freed,
    "Wrapper": Wrapper,
    "float4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_tensor_without_readable_values_gives_a_reason_and_a_row_of_zeros(implementation, kind):
    tensor = UNSUPPORTED[kind]()
    reason = statistics_without_extension.unsupported_reason(tensor)
    assert reason
    assert kind in reason
    rows = StatisticsTable(2)
    rows.values[:] = 5.0
    rows.measure(0, [tensor, torch.ones(2)])
    rows.synchronize()
    assert not rows.values[0].any()
    assert rows.unsupported == {0: reason}
    assert rows.values[1, 0] == 2
    assert reductions.check_finite([tensor, torch.ones(2)]) == (pytest.approx(2.0), -1)
    assert reductions.any_nonzero([tensor]) is False
    assert exponent_histogram.exponents(tensor) is None
    assert content_hash(tensor) is None
    snapshot = ParameterSnapshot(1000)
    snapshot.take([tensor], rows, 0)
    snapshot.diff([tensor], rows, 0)
    rows.synchronize()
    assert not rows.values[0].any()
    assert snapshot.available


def test_tensors_inside_vmap_and_func_grad_give_a_reason(implementation):
    reasons = []

    def measure(x):
        rows = StatisticsTable(1)
        rows.measure_one(0, x)
        rows.synchronize()
        reasons.append((statistics_without_extension.unsupported_reason(x), rows.unsupported[0]))
        return x.sum()

    torch.func.vmap(measure)(torch.ones(3, 4))
    torch.func.grad(measure)(torch.ones(3))
    assert len(reasons) == 2
    for reason, recorded in reasons:
        assert reason == recorded
        assert "torch.func" in reason


def test_a_supported_tensor_has_no_reason():
    for tensor in (torch.ones(2), torch.ones(2, dtype=torch.bool), torch.eye(2).to_sparse(), torch.nn.Parameter(torch.ones(1))):
        assert statistics_without_extension.unsupported_reason(tensor) is None


@pytest.mark.parametrize("setting", ["half", "meta", "deterministic", "inference", "autocast", "no_grad", "flush_denormal"])
def test_global_torch_settings_do_not_change_the_statistics(implementation, setting):
    tensors = [torch.full((5000,), 7.0), torch.arange(70_000), torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.bfloat16)]
    rows = StatisticsTable(len(tensors))
    snapshot = ParameterSnapshot(10**7)
    random_state = torch.get_rng_state()
    try:
        match setting:
            case "half":
                torch.set_default_dtype(torch.float16)
            case "meta":
                torch.set_default_device("meta")
            case "deterministic":
                torch.use_deterministic_algorithms(True)
            case "flush_denormal":
                torch.set_flush_denormal(True)
        with (
            torch.inference_mode(setting == "inference"),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting == "autocast"),
            torch.set_grad_enabled(setting != "no_grad"),
        ):
            rows.measure(0, tensors)
            total, bad = reductions.check_finite(tensors)
            histogram = exponent_histogram.exponents(tensors[1])
            fingerprints = [content_hash(tensor) for tensor in tensors]
            rows.synchronize()
            found = rows.values.copy()
            snapshot.take(tensors, rows, 0)
            rows.synchronize()
        tensors[0] += 1  # copies made in any mode must be usable outside of it
        snapshot.diff(tensors, rows, 0)
        rows.synchronize()
        changed = rows.values.copy()
        snapshot.take(tensors, rows, 0)
        assert snapshot.available, snapshot.reason
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
    assert not rows.unsupported
    assert found[:, 1].tolist() == pytest.approx([7.0, 34999.5, 1 / 3, 1.0])
    squares = 5000 * 49 + sum(i * i for i in range(70_000)) + 3 + 3
    assert (total, bad) == (pytest.approx(squares, rel=1e-5), -1)
    assert sum(histogram[1]) == 69_999
    assert None not in (fingerprints[0], fingerprints[1], fingerprints[3])
    assert changed[:, 1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.equal(torch.get_rng_state(), random_state)


class Transfers(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_measuring_reads_no_single_number_from_a_tensor(implementation):
    tensors = [torch.ones(3), torch.arange(5), torch.ones(2, dtype=torch.complex64), torch.eye(3).to_sparse()]
    rows = StatisticsTable(4)
    with Transfers() as transfers:
        rows.measure(0, tensors)
        rows.synchronize()
    assert "aten::_local_scalar_dense" not in transfers.names
    assert "aten::item" not in transfers.names
    # The native extension calls no torch operation on an ordinary tensor, so a user's dispatch mode is not called.
    if implementation != "torch":
        with Transfers() as transfers:
            rows.measure(0, [torch.ones(3).detach()] * 4)
            rows.synchronize()
        assert set(transfers.names) <= {"aten::ones", "aten::detach"}


def test_no_tensor_is_kept_alive(implementation):
    rows = StatisticsTable(3)
    snapshot = ParameterSnapshot(10**6)
    tensors = [torch.ones(3), torch.arange(5), torch.eye(3).to_sparse()]
    alive = [weakref.ref(tensor) for tensor in tensors]
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors[:2]]
    rows.measure(0, tensors)
    reductions.check_finite(tensors)
    reductions.any_nonzero(tensors)
    snapshot.take(tensors, rows, 0)
    snapshot.diff(tensors, rows, 0)
    held = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided and t.numel()]
    mine = {id(tensor) for tensor in tensors}
    assert not [t for t in held if id(t) not in mine and t.untyped_storage().data_ptr() in storages]
    del tensors, held
    assert [ref() for ref in alive] == [None, None, None]


def test_an_error_inside_torch_becomes_a_reason(implementation, monkeypatch):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(torch, "stack", no_memory)
    monkeypatch.setattr(torch, "empty_like", no_memory)
    rows = StatisticsTable(1)
    rows.measure_one(0, torch.arange(3))
    rows.synchronize()
    assert rows.unsupported == {0: "OutOfMemoryError: CUDA out of memory."}
    snapshot = ParameterSnapshot(1000)
    snapshot.take([torch.ones(3)], rows, 0)
    assert not snapshot.available
    assert "out of memory" in snapshot.reason
    assert reductions.check_finite([torch.arange(3)])[1] == -1


def test_a_keyboard_interrupt_is_raised(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "stack", interrupt)
    with pytest.raises(KeyboardInterrupt):
        StatisticsTable(1).measure_one(0, torch.arange(3))
