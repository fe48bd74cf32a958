"""R07: leaving undoes everything, in any order. R08: also after an exception, and the run says how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

import sonde
from model_examples import BY_NAME, PROGRAMS, Program
from training_harness import OPTIMIZERS, Outcome, hook_counts, one_step, patched_functions, train


@pytest.mark.parametrize("every", [1, None], ids=["every step", "default"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_r07_every_hook_dictionary_has_its_former_length_afterwards(program: Program, every: int | None, tmp_path: Path) -> None:
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, functions, own_call = hook_counts(model, optimizer), patched_functions(), type(model).__dict__.get("__call__")
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=every, strict=True):
        assert type(model).__dict__.get("__call__") is not own_call
        for _ in range(2):
            one_step(program, model, optimizer)
            assert hook_counts(model, optimizer) == before  # also between two steps
    assert hook_counts(model, optimizer) == before
    assert type(model).__dict__.get("__call__") is own_call
    assert patched_functions() == functions


def test_r07_the_users_own_hooks_stay(tmp_path: Path) -> None:
    program = BY_NAME["mlp"]
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fired: list[str] = []
    model[0].register_forward_hook(lambda *_: fired.append("before"))
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        model[0].register_forward_hook(lambda *_: fired.append("during"))
        optimizer.register_step_post_hook(lambda *_: fired.append("stepped"))
        one_step(program, model, optimizer)
    one_step(program, model, optimizer)
    assert fired == ["before", "during", "stepped"] * 2


def test_r07_closing_twice_is_fine(tmp_path: Path) -> None:
    session = sonde.watch(nn.Linear(1, 1), to=tmp_path / "run", strict=True)
    session.close()
    session.close("exception", exit_code=1)
    assert sonde.Run(tmp_path / "run").ended.how == "finished"
    assert len(list(sonde.Run(tmp_path / "run").events("end"))) == 1


@pytest.mark.parametrize("where", ["forward hook", "optimizer hook", "backward hook", "forward"])
def test_r07_closing_inside_of_a_hook_is_fine(where: str, tmp_path: Path) -> None:
    program = BY_NAME["mlp"]
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, functions = hook_counts(model, optimizer), patched_functions()
    session = sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True)
    one_step(program, model, optimizer)

    def close(*_: Any) -> None:
        session.close()

    if where == "forward hook":
        handle = model[1].register_forward_hook(close)
    elif where == "forward":
        handle = model[1].register_forward_pre_hook(close)
    elif where == "optimizer hook":
        handle = optimizer.register_step_pre_hook(close)
    else:
        handle = model[2].weight.register_post_accumulate_grad_hook(close)
    one_step(program, model, optimizer)
    handle.remove()
    if where == "backward hook":
        model[2].weight._post_accumulate_grad_hooks = None
    one_step(program, model, optimizer)
    assert hook_counts(model, optimizer) == before
    assert patched_functions() == functions
    assert sonde.Run(tmp_path / "run").ended.how == "finished"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.sampled_from(["attach", "detach", "step", "pause"]), st.integers(0, 2)), min_size=3, max_size=12))
def test_r07_sessions_come_and_go_in_any_order(moves: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("runs")
    program = BY_NAME["residual"]

    def play(watching: bool) -> list[float]:
        torch.manual_seed(0)
        model = program.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        before, functions = hook_counts(model, optimizer), patched_functions()
        sessions: dict[int, Any] = {}
        expected: dict[int, int] = {}
        losses, num = [], 0
        for move, which in moves:
            if move == "step":
                losses.append(one_step(program, model, optimizer))
                expected = {key: count + 1 for key, count in expected.items()}
            elif not watching:
                continue
            elif move == "attach" and which not in sessions:
                num += 1
                sessions[which] = sonde.watch(model, optimizer, to=folder / str(num), every=1 + which, strict=True)
                expected[which] = 0
            elif move == "detach" and which in sessions:
                session = sessions.pop(which)
                session.close()
                assert sonde.Run(session.run).last_step == expected.pop(which) - 1
            elif move == "pause" and which in sessions:
                with sessions[which].pause():
                    pass
        for session in sessions.values():
            session.close()
        assert hook_counts(model, optimizer) == before
        assert patched_functions() == functions
        return losses

    assert play(watching=True) == play(watching=False)


# -- R08 -------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Boom("in backward")


class BrokenOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise Boom("in the optimizer")


class BrokenData(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise Boom("in the data")
        return torch.ones(6)


def _in_forward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise Boom("in forward")

    model[2].forward = forward
    try:
        model(torch.ones(2, 6))
    finally:
        del model[2].forward


def _in_a_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    handle = model[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Boom("in a layer")))
    try:
        model(torch.ones(2, 6))
    finally:
        handle.remove()


def _in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    Breaks.apply(model(torch.ones(2, 6))).sum().backward()


def _in_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    BrokenOptimizer(model.parameters(), lr=0.1).step()


def _in_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x in DataLoader(BrokenData(), batch_size=1):
        model(x).sum().backward()
        optimizer.step()


def _in_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        raise Boom("in the closure")

    torch.optim.LBFGS(model.parameters()).step(closure)


RAISING = {
    "forward": _in_forward, "layer": _in_a_layer, "backward": _in_backward, "optimizer": _in_optimizer, "data": _in_data,
    "closure": _in_closure,
}  # fmt: skip


@pytest.mark.parametrize("where", RAISING)
def test_r08_an_exception_leaves_no_hook_and_the_run_says_how_it_ended(where: str, tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, functions = hook_counts(model, optimizer), patched_functions()

    def program() -> None:
        with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
            one_step(BY_NAME["mlp"], model, optimizer)
            RAISING[where](model, optimizer)

    with pytest.raises(Boom) as raised:
        program()
    assert raised.value.__context__ is None
    assert hook_counts(model, optimizer) == before
    assert patched_functions() == functions
    ended = sonde.Run(tmp_path / "run").ended
    assert (ended.how, ended.exit_code) == ("exception", 1)
    assert ended.exception is not None
    assert ended.exception.startswith("Boom: in ")


@pytest.mark.parametrize("where", ["layer", "backward", "data"])
def test_r08_training_on_after_a_caught_exception_is_as_without_sonde(where: str, tmp_path: Path) -> None:
    """The user catches the error inside of the session and goes on: the next steps are as good as any."""

    def play(to: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = BY_NAME["mlp"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = sonde.watch(model, optimizer, to=to, every=1, strict=True) if to else None
        for _ in range(3):
            with pytest.raises(Boom):
                RAISING[where](model, optimizer)
        losses = [one_step(BY_NAME["mlp"], model, optimizer) for _ in range(3)]
        if session is not None:
            session.close()
        return losses

    assert play(tmp_path / "run") == play(None)
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("forwards")[1][-2:].tolist() == [1, 1]
    steps, num = run.series("activation", "2", "num")
    assert steps[-2:].tolist() == [run.last_step - 1, run.last_step]
    assert num[-1] == 5 * 8


def test_r08_a_new_session_after_a_failed_one_sees_a_fresh_training(tmp_path: Path) -> None:
    def outcome() -> Outcome:
        return train(BY_NAME["residual"], OPTIMIZERS["AdamW fused"])

    expected = outcome()
    model = BY_NAME["mlp"].build()
    with pytest.raises(Boom), sonde.watch(model, to=tmp_path / "run", every=1, strict=True):
        _in_a_layer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert outcome() == expected


def test_r08_the_error_of_a_model_that_is_itself_a_leaf_is_the_users_own(tmp_path: Path) -> None:
    """torch walks the module's dictionary of hooks while it calls ours after an error, and the leaf's hook is in the same one."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hook_counts(model, optimizer)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
                model(torch.ones(2, 5))
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
    assert hook_counts(model, optimizer) == before
    assert sonde.Run(tmp_path / "run").scalar("forwards")[1].tolist() == [3, 1]
