"""What a user's hooks, destructors and signals may do in the middle of a step."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde

pytestmark = pytest.mark.torch

STEPS = 60
NUMBER = 45  # of the step in which something happens


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()


class Doomed:
    def __init__(self, last_wish: Callable[[], object]) -> None:
        self.last_wish = last_wish

    def __del__(self) -> None:
        self.last_wish()


def test_a_hook_of_the_users_may_close_the_session_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    model, optimizer = pair()
    sessions: list[sonde.DebugSession] = []

    def leave(module: nn.Module, args: object) -> None:
        if sessions:
            sessions.pop().close()

    model.register_forward_pre_hook(leave)  # runs between our callbacks for the start and the end of the forward
    session = sonde.watch(model, optimizer, to=tmp_path)
    one_step(model, optimizer)
    sessions.append(session)
    one_step(model, optimizer)
    assert not sessions
    assert sonde.Run(tmp_path).last_step == 0


def test_an_error_of_ours_at_the_end_of_a_step_stays_ours(tmp_path: Path) -> None:
    model, optimizer = pair()
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000) as session:
        for number in range(STEPS):
            if number == NUMBER:
                del session._recorder.scalars["optimizer_steps"]
            one_step(model, optimizer)
        assert session._isolation.counts["on_optimizer_step_end", ""]


def test_a_step_with_a_scalar_that_is_new_is_in_the_file_when_it_has_ended(tmp_path: Path) -> None:
    model, optimizer = pair()
    last_steps = []
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000):
        for number in range(24):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            model(torch.randn(5, 6)).abs().mean().backward()
            if number >= 21:
                model(torch.randn(5, 6)).exp().mean().backward()
            optimizer.step()
            if number >= 20:
                last_steps.append(sonde.Run(tmp_path).last_step)
    assert last_steps == [20, 21, 22, 23]


class Interrupted(torch.optim.SGD):
    """Ctrl-C is pressed while somebody who is not torch asks for its groups."""

    @property
    def param_groups(self) -> Any:
        if self.__dict__.pop("armed", False):
            raise KeyboardInterrupt
        return self.__dict__["groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["groups"] = groups


def test_ctrl_c_inside_of_what_is_asked_of_the_user_is_his(tmp_path: Path) -> None:
    model, _ = pair()
    optimizer = Interrupted(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000):
        for _ in range(NUMBER):
            one_step(model, optimizer)
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.__dict__["armed"] = True
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        for _ in range(10):
            one_step(model, optimizer)
    assert sonde.Run(tmp_path).last_step == NUMBER + 9


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Files cannot grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_ctrl_c_while_a_short_write_is_handled_reaches_the_user(tmp_path: Path, full_disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    model, optimizer = pair()
    session = sonde.watch(model, optimizer, to=tmp_path, every=10_000)
    for _ in range(NUMBER):
        one_step(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(session._recorder.writer, "_count_dropped", interrupted)
        full_disk(session._recorder.writer.path.stat().st_size + 100)
        with pytest.raises(KeyboardInterrupt):
            one_step(model, optimizer)
    full_disk(resource.RLIM_INFINITY)
    session.close()
    assert not sonde.Run(tmp_path).damage


def test_a_destructor_may_attach_a_model_while_the_inputs_of_a_step_are_let_go_of(tmp_path: Path) -> None:
    model, optimizer = pair()
    others: list[nn.Module] = []
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000) as session:

        def attach() -> None:
            others.append(nn.Linear(2, 2))
            session.attach(others[-1])

        for number in range(STEPS):
            x: Any = torch.randn(5, 6)
            if number >= NUMBER:
                x.doomed = Doomed(attach)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            del x
            loss.backward()
            del loss
            optimizer.step()
        assert len(others) == STEPS - NUMBER
        assert not session._isolation.counts
    assert sonde.Run(tmp_path).last_step == STEPS - 1


def test_a_destructor_may_make_an_optimizer_while_the_frame_of_backward_is_let_go_of(tmp_path: Path) -> None:
    model, optimizer = pair()
    made = []

    def make() -> None:
        made.append(float(len(torch.optim.SGD(model.parameters(), lr=0.02).param_groups)))

    def learn(number: int) -> None:
        doomed = Doomed(make) if number == NUMBER else None  # noqa: F841 - as long as the frame is
        model(torch.randn(5, 6)).square().mean().backward()

    with sonde.watch(model, optimizer, to=tmp_path, every=10_000):
        for number in range(STEPS):
            optimizer.zero_grad()
            learn(number)
            optimizer.step()
    assert len(made) == 1
    assert sonde.Run(tmp_path).last_step == STEPS - 1


def test_a_step_waits_while_another_thread_writes_and_nothing_is_lost(tmp_path: Path) -> None:
    model, optimizer = pair()
    over = threading.Event()
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000, strict=True) as session:
        writer = session._recorder.writer

        def disturb() -> None:
            while not over.wait(0.001):
                with writer._lock:
                    time.sleep(0.001)
                session.log(noise=1.0)

        thread = threading.Thread(target=disturb)
        thread.start()
        for _ in range(300):
            one_step(model, optimizer)
        over.set()
        thread.join()
    run = sonde.Run(tmp_path)
    assert not run.damage
    assert list(run.scalar("optimizer_steps")[0]) == list(range(300))
