"""R19: modules of every kind. R20: models that change while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

import sonde
from model_examples import BY_NAME


def watch(model: nn.Module, optimizer: Any, tmp_path: Path) -> sonde.DebugSession:
    return sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True)


def paths(run: sonde.Run, kind: str) -> set[str]:
    return {run.sites[i].path for frame in run.frames(kind) for i in frame.sites.tolist()}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_r19_a_shared_module_reports_every_call(tmp_path: Path) -> None:
    model = BY_NAME["shared"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs: list[torch.Tensor] = []
    model.block.register_forward_hook(lambda _m, _a, out: inputs.append(out.detach().clone()))
    with watch(model, optimizer, tmp_path):
        one_step(model, optimizer, torch.randn(5, 6))
    run = sonde.Run(tmp_path / "run")
    for call in range(3):
        (largest,) = run.series("activation", "block", "max", call=call)[1]
        assert largest == pytest.approx(inputs[call].max().item())
        assert run.series("activation_gradient", "block", "num", call=call)[1].tolist() == [30]
    assert run.series("activation", "block", "num", call=3)[0].size == 0
    assert "block.weight" in paths(run, "gradient")
    assert "again.weight" not in paths(run, "gradient")


def test_r19_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    model = BY_NAME["tied"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        BY_NAME["tied"].loss(model).backward()
        optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert paths(run, "gradient") == {"embed.weight", "mix.weight", "mix.bias"}
    (event,) = run.events("model")
    assert event.data["num_parameters"] == 12 * 6 + 6 * 6 + 6


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_r19_lazy_modules_can_be_watched_before_their_first_forward(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for _ in range(3):
            one_step(model, optimizer, torch.randn(5, 6))
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 2
    assert run.series("gradient", "0.weight", "num")[1].tolist() == [24, 24, 24]
    assert run.series("activation", "0", "num")[1][-2:].tolist() == [20, 20]


def test_r19_parametrized_weights_are_measured_where_they_are_kept(tmp_path: Path) -> None:
    model = BY_NAME["parametrized"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        one_step(model, optimizer, torch.randn(5, 6))
    run = sonde.Run(tmp_path / "run")
    assert paths(run, "gradient") == {name for name, _ in model.named_parameters()}
    assert paths(run, "activation") == {"0", "1", "2"}


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.named = nn.ModuleDict({"left": nn.Linear(3, 1), "unused": nn.Linear(3, 1)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.row:
            x = module(x)
        return self.named["left"](x) * self.scales[0]


def test_r19_modules_in_lists_and_dictionaries_are_found(tmp_path: Path) -> None:
    model = Boxes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for _ in range(2):
            one_step(model, optimizer, torch.randn(2, 3))
    run = sonde.Run(tmp_path / "run")
    assert paths(run, "activation") == {"row.0", "row.1", "named.left"}
    assert run.series("gradient", "named.unused.weight", "num")[1].tolist() == [0, 0]
    assert run.series("gradient", "scales.0", "num")[1].tolist() == [1, 1]


def test_r19_functional_calls_gradients_and_vmap_over_a_watched_model_work(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3)

    def loss_of(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (row,)).square().sum()

    def derive() -> dict[str, torch.Tensor]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return vmap(grad(loss_of), in_dims=(None, 0))(parameters, x)

    expected = derive()
    with watch(model, optimizer, tmp_path):
        inside = derive()
        assert torch.equal(functional_call(model, dict(model.named_parameters()), (x,)), model(x))
        one_step(model, optimizer, x)
    for name, value in expected.items():
        assert torch.equal(inside[name], value)
    assert not list(sonde.Run(tmp_path / "run").events("retired"))


def test_r19_meta_and_fake_tensors_pass_through_a_watched_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.device("meta"):
        hollow = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(hollow.parameters(), lr=0.1)
    with watch(hollow, optimizer, tmp_path):
        assert hollow(torch.empty(2, 3, device="meta")).shape == (2, 1)
        hollow(torch.empty(2, 3, device="meta")).sum().backward()
        optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert not list(run.events("retired"))
    assert "activation" not in run.kinds
    with sonde.watch(model, to=tmp_path / "fake", every=1, strict=True), FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(2, 3)).shape == (2, 1)


# -- R20 -------------------------------------------------------------------------------------------


def test_r20_frozen_parameters_have_no_gradient_and_no_update(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for _ in range(2):
            one_step(model, optimizer, torch.randn(5, 6))
    run = sonde.Run(tmp_path / "run")
    assert run.series("gradient", "0.weight", "num")[1].tolist() == [0, 0]
    assert run.series("update", "0.weight", "l2")[1].tolist() == [0, 0]
    assert run.series("update", "2.weight", "l2")[1].min() > 0
    assert {site.path for site in run.sites.values() if site.kind == "parameter" and not site.trainable} == {"0.weight", "0.bias"}


def test_r20_freezing_in_the_middle_shows_from_that_step_on(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(False)
            one_step(model, optimizer, torch.randn(5, 6))
    assert sonde.Run(tmp_path / "run").series("gradient", "0.weight", "num")[1].tolist() == [48, 48, 0, 0]


def test_r20_a_gradient_set_to_none_by_hand_counts_as_no_gradient(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            if step == 1:
                model[2].weight.grad = None
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert run.series("gradient", "2.weight", "num")[1].tolist() == [64, 0, 64]
    assert run.series("update", "2.weight", "l2")[1][1] == 0


class Adapter(nn.Module):
    """A LoRA-like addition around a layer that stays as it is."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


def test_r20_layers_added_while_training_are_measured_from_then_on(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for step in range(12):
            if step == 3:
                model[2].requires_grad_(False)
                model[2] = Adapter(model[2])
                optimizer.add_param_group({"params": [*model[2].down.parameters(), *model[2].up.parameters()]})
            one_step(model, optimizer, torch.randn(5, 6))
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 11
    steps, num = run.series("gradient", "2.up.weight", "num")
    assert steps.tolist() == list(range(3, 12))
    assert set(num.tolist()) == {16}
    # outputs are planned anew after the steps 0, 1, 2, 4, 8 …
    assert run.series("activation", "2.down", "num")[0].tolist() == list(range(3, 12))


def test_r20_layers_removed_while_training_are_no_trouble(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for step in range(8):
            if step == 3:
                model[2] = nn.Identity()  # its parameters stay in the optimizer
            if step == 5:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            one_step(model, optimizer, torch.randn(5, 6))
    run = sonde.Run(tmp_path / "run")
    assert run.last_step >= 4
    assert not list(run.events("retired"))


def test_r20_pruning_while_training_is_no_trouble(tmp_path: Path) -> None:
    from torch.nn.utils import prune

    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        for step in range(6):
            if step == 2:
                prune.l1_unstructured(model[0], "weight", amount=0.5)
            if step == 4:
                prune.remove(model[0], "weight")
            one_step(model, optimizer, torch.randn(5, 6))
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 5
    assert run.series("activation", "0", "num")[0].tolist() == [0, 1, 2, 3, 4, 5]


class Hostile(nn.Module):
    """Whose every question but torch's own is answered with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def __getattr__(self, name: str) -> Any:
        for store in ("_parameters", "_modules", "_buffers"):
            if name in self.__dict__.get(store, {}):
                return self.__dict__[store][name]
        raise RuntimeError(f"nobody may ask for {name}")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __len__(self) -> int:
        raise RuntimeError("of no length")

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


def test_r19_a_model_that_answers_questions_with_errors_is_watched_and_looked_back_at(tmp_path: Path) -> None:
    model = Hostile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        one_step(model, optimizer, torch.randn(5, 6))
        for x in [torch.full((5, 6), float("nan"))]:
            one_step(model, optimizer, x)
    run = sonde.Run(tmp_path / "run")
    assert paths(run, "activation") == {"linear"}
    assert [event.data["phase"] for event in run.events("origin")] == ["input"]
