"""R12–R16 through a whole session: in-place successors, outputs of every shape, dtypes, odd sizes, and non-finite numbers."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from model_examples import Pair


class InPlace(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first, self.second, self.relu, self.inplace = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=inplace), inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.relu(self.first(x)))
        if self.inplace:
            y += x
            y.mul_(2)
            return y
        return (y + x) * 2


def test_r12_statistics_are_of_the_value_at_the_hook_whatever_is_done_in_place_later(tmp_path: Path) -> None:
    for inplace in (True, False):
        torch.manual_seed(0)
        model = InPlace(inplace)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sonde.watch(model, optimizer, to=tmp_path / str(inplace), every=1, strict=True):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
    inside, beside = sonde.Run(tmp_path / "True"), sonde.Run(tmp_path / "False")
    for path in ("first", "relu", "second"):
        for field in ("mean", "std", "min", "max", "l2", "zeros"):
            for kind in ("activation", "activation_gradient"):
                left, right = inside.series(kind, path, field), beside.series(kind, path, field)
                if kind == "activation_gradient" and path == "first":
                    continue  # after an in-place successor, the gradient of a tensor is that of its new value
                assert np.array_equal(left, right), (kind, path, field)
    assert inside.series("activation", "first", "min")[1].min() < 0  # and not what the ReLU left of it


# -- R13 -------------------------------------------------------------------------------------------

Named = namedtuple("Named", "left right")


class Hostile:
    """Does nothing but raise when it is looked into."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("do not iterate")

    def __len__(self) -> int:
        raise RuntimeError("do not count")

    def __bool__(self) -> bool:
        raise RuntimeError("do not ask")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare")

    __hash__ = None  # type: ignore[assignment]


class HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("do not list")


def _cyclic(x: torch.Tensor) -> Any:
    loop: list[Any] = [x]
    loop.append({"again": loop})
    return loop


def _deep(x: torch.Tensor) -> Any:
    value: Any = x
    for _ in range(50):
        value = [value]
    return value


# what a module puts out -> how many of its tensors are measured
TABLE: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "none": (lambda x: None, 0),
    "int": (lambda x: 7, 0),
    "text": (lambda x: "tensor", 0),
    "tensor": (lambda x: x, 1),
    "tuple": (lambda x: (x, 1, x * 2), 2),
    "list": (lambda x: [x, None], 1),
    "dict": (lambda x: {"a": x, 3: x * 2, None: "no"}, 2),
    "dataclass": (lambda x: Pair(x, x * 2), 2),
    "namedtuple": (lambda x: Named(x, x * 2), 2),
    "nested": (lambda x: ({"a": [x, (x * 2,)]}, Pair(x * 3)), 3),
    "empty containers": (lambda x: ([], {}, ()), 0),
    "generator": (lambda x: (x * i for i in range(3)), 0),
    "iterator": (lambda x: iter([x, x]), 0),
    "set": (lambda x: {1, 2}, 0),
    "hostile": (lambda x: Hostile(), 0),
    "cyclic": (_cyclic, 1),
    "too deep": (_deep, 0),
    "many": (lambda x: [x * i for i in range(100)], 64),
    "parameter": (lambda x: nn.Parameter(torch.ones(2)), 1),
    "ndarray": (lambda x: np.ones(3), 0),
    "class": (lambda x: Pair, 0),
}


class Gives(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


class Around(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.gives = nn.Linear(3, 3), Gives(make)
        self.given: list[Any] = []  # in a list: an attribute that is a Parameter would become the model's own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.given = [self.gives(x)]
        return x


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", TABLE)
def test_r13_whatever_a_module_puts_out_its_tensors_are_found_and_nothing_is_consumed(kind: str, tmp_path: Path) -> None:
    make, num_tensors = TABLE[kind]
    model = Around(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            one_step(model, optimizer)
            if kind in ("generator", "iterator"):
                assert len(list(model.given[0])) == (3 if kind == "generator" else 2)
    run = sonde.Run(tmp_path / "run")
    (first, second) = run.frames("activation")
    assert [run.sites[i].path for i in second.sites.tolist()].count("gives") == num_tensors
    assert first.sites.tolist() == second.sites.tolist()
    assert run.last_step == 1


def test_r13_a_mapping_that_raises_when_it_is_listed_costs_only_its_own_statistics(tmp_path: Path) -> None:
    model = Around(lambda x: HostileDict(a=x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=False):
        for _ in range(5):
            one_step(model, optimizer)
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 4
    assert [event.data["where"] for event in run.events("retired")] == ["gives"]
    assert run.series("activation", "first", "num")[0].tolist() == [0, 1, 2, 3, 4]


def test_r13_a_model_may_take_and_return_anything(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs["box"]["loss"] = self.first(kwargs["x"]["deep"][0]).sum()
            return Hostile()

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            box: dict[str, torch.Tensor] = {}
            model(Hostile(), None, (i for i in range(3)), x={"deep": [torch.ones(2, 3)]}, box=box)
            box["loss"].backward()
            optimizer.step()
    assert sonde.Run(tmp_path / "run").last_step == 1


# -- R14, R15 --------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_r14_every_dtype_gives_right_numbers_or_is_said_to_be_unobserved(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 3.0]).to(dtype)
    model = Around(lambda x: values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            one_step(model, optimizer)
    run = sonde.Run(tmp_path / "run")
    steps, largest = run.series("activation", "gives", "max")
    if len(steps) == 0:
        assert [event.data["where"] for event in run.events("unobserved")] == ["gives"]
        assert dtype.is_complex
    else:
        assert largest.tolist() == ([1.0, 1.0] if dtype is torch.bool else [3.0, 3.0])
        assert run.series("activation", "gives", "zeros")[1].tolist() == [1.0, 1.0]
        assert run.series("activation", "gives", "num")[1].tolist() == [4.0, 4.0]


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own about these kinds
@pytest.mark.parametrize("kind", ODD)
def test_r14_kinds_of_tensors_without_statistics_are_said_to_be_unobserved(kind: str, tmp_path: Path) -> None:
    model = Around(lambda x: ODD[kind]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(3):
            one_step(model, optimizer)
    run = sonde.Run(tmp_path / "run")
    (said,) = run.events("unobserved")
    assert said.data["where"] == "gives"
    assert said.data["reason"]
    assert run.series("activation", "gives", "num")[0].size == 0


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.0),
    "one": lambda: torch.ones(1, 1, 1),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "strided": lambda: torch.arange(20.0)[::3],
    "expanded": lambda: torch.ones(1, 3).expand(1000, 3),
    "channels last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "many dimensions": lambda: torch.ones([1] * 20 + [2]),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_r15_odd_shapes_give_right_numbers_and_no_alarm(shape: str, tmp_path: Path) -> None:
    model = Around(lambda x: SHAPES[shape]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            one_step(model, optimizer)
    run = sonde.Run(tmp_path / "run")
    tensor = SHAPES[shape]()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    assert run.series("activation", "gives", "num")[1].tolist() == [tensor.numel()] * 2
    assert run.series("activation", "gives", "nan")[1].tolist() == [0, 0]
    if tensor.numel():
        assert run.series("activation", "gives", "l2")[1] == pytest.approx([tensor.double().norm().item()] * 2)
        assert run.series("activation", "gives", "max")[1].tolist() == [tensor.max().item()] * 2
    assert not list(run.events("nonfinite"))


def test_r15_an_empty_batch_is_no_alarm(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for size in (2, 0, 2):
            optimizer.zero_grad()
            model(torch.ones(size, 3)).sum().backward()
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert not list(run.events("nonfinite"))
    assert run.series("activation", "0", "num")[1].tolist() == [6, 0, 6]


# -- R16 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layer", ["0", "1", "2"])
def test_r16_the_layer_and_step_of_a_bad_number_are_in_the_run_beside_all_else(layer: str, value: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done: list[float] = []

    def poison(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if len(done) != 2:
            return None
        spoiled = output.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    model[int(layer)].register_forward_hook(poison)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            done.append(loss.item())
    run = sonde.Run(tmp_path / "run")
    bad = {path: run.series("activation", path, "nan")[1] + run.series("activation", path, "inf")[1] for path in ("0", "1", "2")}
    assert bad[layer].tolist() == [0, 0, 1]
    for earlier in range(int(layer)):
        assert bad[str(earlier)].tolist() == [0, 0, 0]
    assert np.isfinite(run.series("activation", layer, "mean")[1]).all()  # over the finite elements
    assert {event.step for event in run.events("nonfinite")} <= {2}


def test_r16_the_guard_never_lapses_on_steps_that_are_not_observed(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1000, strict=True):
        for step in range(8):
            optimizer.zero_grad()
            x = torch.ones(2, 3)
            if step == 3:
                x[0, 0] = float("nan")
            loss = model(x).sum()
            if step == 5:
                loss = loss * float("inf")
            loss.backward()
            if step == 6:
                model.weight.grad[0, 1] = float("inf")
            optimizer.step()
            with torch.no_grad():  # 0 times NaN is NaN: the next step shall be healthy
                for p in model.parameters():
                    p.nan_to_num_(0.5)
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("observed")[1].tolist() == [1] + [0] * 7
    seen = {(event.step, event.data["what"]) for event in run.events("nonfinite")}
    assert seen == {(3, "input"), (3, "loss"), (3, "gradient"), (5, "loss"), (5, "gradient"), (6, "gradient")}
    (event,) = [event for event in run.events("nonfinite") if event.step == 6]
    assert event.data["where"] == "weight"
    assert (event.data["num_nan"], event.data["num_inf"], event.data["num_elements"]) == (0, 1, 3)
