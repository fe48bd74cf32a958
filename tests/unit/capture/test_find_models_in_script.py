"""Finding models in programs that know nothing of Sonde. A session without a model does what `sonde run` does around a script."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import sonde
from model_examples import Gan, gan_step
from training_harness import patched_functions

STEPS = 6


def watched(program: Callable[[], None], tmp_path: Path) -> sonde.Run:
    """Runs a program under a session that has to find everything by itself."""
    before = patched_functions()
    with sonde.DebugSession(sonde.DebugConfig(every=1), to=tmp_path / "run", strict=True):
        program()
    assert patched_functions() == before
    return sonde.Run(tmp_path / "run")


def parameter_names(run: sonde.Run) -> set[str]:
    return {site.name for site in run.sites.values() if site.kind == "parameter"}


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def step(call: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    call(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()


def test_a_plain_script_is_watched_from_its_first_step(tmp_path: Path) -> None:
    def program() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            step(model, optimizer)

    run = watched(program, tmp_path)
    assert run.last_step == STEPS - 1
    assert run.scalar("forwards")[1].tolist() == [1] * STEPS
    assert parameter_names(run) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert run.series("activation", "0", "num")[0].tolist()[-1] == STEPS - 1
    (event,) = run.events("model")
    assert event.data["model"] == "model"


def test_a_model_in_a_class_is_found_with_its_name(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.network = make()
            self.optimizer = torch.optim.Adam(self.network.parameters())

        def fit(self) -> None:
            for _ in range(STEPS):
                self.one()

        def one(self) -> None:
            self.optimizer.zero_grad()
            self.network(torch.randn(5, 3)).square().mean().backward()
            self.optimizer.step()

    run = watched(lambda: Trainer().fit(), tmp_path)
    assert run.last_step == STEPS - 1
    assert [event.data["model"] for event in run.events("model")] == ["self.network"]
    assert run.scalar("forwards")[1].tolist() == [1] * STEPS


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)


def test_a_model_called_by_its_parts_is_one_model(tmp_path: Path) -> None:
    def program() -> None:
        model = TwoParts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            step(lambda x: model.decoder(torch.relu(model.encoder(x))), optimizer)

    run = watched(program, tmp_path)
    assert run.last_step == STEPS - 1
    assert len(list(run.events("model"))) == 1
    assert parameter_names(run) == {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}


def test_two_models_with_two_optimizers_are_both_found(tmp_path: Path) -> None:
    def program() -> None:
        gan = Gan()
        maker, judge = gan.maker, gan.judge
        del gan
        of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
        for _ in range(STEPS):
            gan_step(maker, judge, of_maker, of_judge)

    run = watched(program, tmp_path)
    assert run.last_step == STEPS - 1
    assert run.scalar("optimizer_steps")[1].tolist() == [2] * STEPS
    assert {event.data["model"] for event in run.events("model")} == {"maker", "judge"}
    assert len(parameter_names(run)) == 8


def test_models_that_a_comprehension_passes_by_keep_their_own_names(tmp_path: Path) -> None:
    def program() -> None:
        encoder, decoder = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (encoder, decoder)]
        for _ in range(STEPS):
            decoder(encoder(torch.randn(5, 3))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert {event.data["model"] for event in watched(program, tmp_path).events("model")} == {"encoder", "decoder"}


def test_an_optimizer_built_in_a_helper_is_found(tmp_path: Path) -> None:
    def build(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        return {"main": torch.optim.AdamW([{"params": list(model.parameters()), "lr": 0.01}])}

    def program() -> None:
        net = make()
        optimizer = build(net)["main"]
        for _ in range(STEPS):
            step(net, optimizer)

    run = watched(program, tmp_path)
    assert run.last_step == STEPS - 1
    assert run.scalar("lr")[1].tolist() == [0.01] * STEPS
    assert len(parameter_names(run)) == 4


def test_a_functional_program_without_any_module_is_still_counted(tmp_path: Path) -> None:
    def program() -> None:
        weight, bias = torch.randn(1, 3, requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight, bias], lr=0.1)
        for _ in range(STEPS):
            step(lambda x: F.linear(x, weight, bias), optimizer)

    run = watched(program, tmp_path)
    assert run.last_step == STEPS - 1
    assert run.scalar("backwards")[1].tolist() == [1] * STEPS
    assert run.series("step", "loss", "value")[1].size == STEPS
    assert len(parameter_names(run)) == 2


def test_a_model_that_is_only_evaluated_beside_the_training_is_not_in_the_way(tmp_path: Path) -> None:
    def program() -> None:
        teacher, student = make().eval(), make()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(STEPS):
            x = torch.randn(5, 3)
            with torch.no_grad():
                target = teacher(x)
            optimizer.zero_grad()
            F.mse_loss(student(x), target).backward()
            optimizer.step()

    run = watched(program, tmp_path)
    assert run.last_step == STEPS - 1
    assert run.scalar("forwards")[1].tolist() == [1] * STEPS


def test_losses_that_are_modules_are_not_taken_for_models(tmp_path: Path) -> None:
    def program() -> None:
        model, criterion = make(), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            step(lambda x: criterion(model(x), torch.zeros(5, 1)), optimizer)

    run = watched(program, tmp_path)
    assert [event.data["class"] for event in run.events("model")] == ["Sequential"]


def test_the_global_hooks_are_taken_off_once_everything_is_found(tmp_path: Path) -> None:
    from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

    with sonde.DebugSession(sonde.DebugConfig(every=1), to=tmp_path / "run", strict=True):
        assert len(_global_forward_pre_hooks) == len(_global_forward_hooks) == 1
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, optimizer)
        assert len(_global_forward_pre_hooks) == len(_global_forward_hooks) == 0
        another = make()
        torch.optim.SGD(another.parameters(), lr=0.1)
        assert len(_global_forward_pre_hooks) == 1  # a new optimizer may mean a new model


def test_a_program_that_never_trains_leaves_a_run_without_steps(tmp_path: Path) -> None:
    def program() -> None:
        model = make()
        with torch.no_grad():
            model(torch.ones(1, 3))

    assert watched(program, tmp_path).last_step == -1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_is_found_by_the_variable_that_holds_it(tmp_path: Path) -> None:
    torch._dynamo.reset()

    def program() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fast = torch.compile(model, backend="eager")
        for _ in range(STEPS):
            step(fast, optimizer)

    run = watched(program, tmp_path)
    torch._dynamo.reset()
    assert run.last_step == STEPS - 1
    assert parameter_names(run) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert list(run.events("unobserved"))


class Refusing(nn.Linear):
    """Says nothing about itself, as proxies and containers of some packages."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __hash__ = nn.Linear.__hash__


@pytest.mark.parametrize("is_named", [True, False])
def test_models_that_refuse_to_be_tested_compared_and_printed_are_watched_like_others(is_named: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = nn.Sequential(Refusing(4, 4)), Refusing(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
    with sonde.DebugSession(sonde.DebugConfig(every=1), to=tmp_path / "run", strict=True) as session:
        if is_named:
            session.attach(first, optimizer, name="first").attach(second, optimizer, name="second")
        for _ in range(6):
            optimizer.zero_grad()
            second(first(torch.randn(8, 4))).square().mean().backward()
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert [event.data["num_parameters"] for event in run.events("model")] == [20, 5]
    assert [event.data["num_unowned"] for event in run.events("membership")][-1] == 0


def test_the_parameters_of_lazy_layers_are_counted_once_they_exist(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
    (event,) = sonde.Run(tmp_path / "run").events("model")
    assert (event.data["num_parameters"], event.data["num_trainable"], event.data["class"]) == (41, 41, "Sequential")


def test_nested_tensors_disable_nothing(tmp_path: Path) -> None:
    """Strided ones have no shape. A batch, an input, an output and the labels' scores may be nested."""
    torch.manual_seed(0)
    parts = [torch.randn(length, 4) for length in (2, 3, 5)]
    model, head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    loader = DataLoader([0] * 8, batch_size=1, collate_fn=lambda _: (torch.nested.nested_tensor(parts), torch.tensor([0, 1, 1])))
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        for nested, labels in loader:
            optimizer.zero_grad()
            scores = torch.stack([part.sum(0) for part in head(model(nested)).unbind()])
            nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert not list(run.events("retired"))
    assert {event.data["size"] for event in run.events("data")} == {3}


@pytest.mark.parametrize("is_late", [True, False])
def test_clipping_after_the_update_is_recorded(is_late: bool, tmp_path: Path) -> None:
    def program() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):  # gradient accumulation
                model(torch.randn(5, 3)).square().mean().backward()
            if not is_late:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if is_late:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    (clip,) = [event.data for event in watched(program, tmp_path).events("source") if event.data["call"] == "clip"]
    assert clip.get("is_after_update", False) is is_late
