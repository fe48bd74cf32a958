"""The state of gradients when an optimizer uses them: stale, empty or lost."""

from __future__ import annotations

import threading

import torch
from torch import nn

import sonde
from sonde.capture.zero_grad_tracking import GradientState, OptimizerGradients, optimizer_parameters
from sonde.statistics import reductions


class Loop:
    """A training loop that calls a GradientState for what it does, as a session would."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = GradientState()
        self.entry = self.state.register(self.optimizer)

    def backward(self) -> bool:
        loss = self.model(torch.randn(5, 3)).square().mean()
        cleared = self.state.on_backward_start()
        loss.backward()
        self.state.on_backward_end()
        return cleared

    def zero(self, *, is_called: bool = True, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)
        if is_called:
            self.state.on_zero_grad(self.optimizer)

    def step(self) -> tuple[bool, bool]:
        square, bad = reductions.check_finite([p.grad for p in optimizer_parameters(self.optimizer) if p.grad is not None])
        answer = self.state.on_update(self.entry, is_empty=square == 0 and bad < 0)
        self.optimizer.step()
        return answer


def test_a_sound_loop_has_neither_stale_nor_lost_gradients() -> None:
    loop = Loop()
    for _ in range(4):
        loop.zero()
        loop.backward()
        assert loop.step() == (False, False)


def test_gradients_that_are_never_cleared_are_stale_from_the_second_step_on() -> None:
    loop = Loop()
    answers = []
    for _ in range(3):
        loop.backward()
        answers.append(loop.step())
    assert answers == [(False, False), (True, False), (True, False)]


def test_accumulation_on_purpose_is_not_stale() -> None:
    loop = Loop()
    for _ in range(3):
        for _ in range(4):
            loop.backward()
        assert loop.step() == (False, False)
        loop.zero()


def test_clearing_by_hand_is_noticed_without_a_callback() -> None:
    for way in ("none", "zero"):
        loop = Loop()
        for _ in range(3):
            loop.backward()
            assert loop.step() == (False, False)
            for p in loop.model.parameters():
                if way == "none":
                    p.grad = None
                else:
                    p.grad.zero_()


def test_clearing_between_backward_and_step_loses_the_gradients() -> None:
    loop = Loop()
    for to_none in (True, False):
        loop.backward()
        loop.zero(is_called=False, to_none=to_none)
        assert loop.step() == (False, True)


def test_a_step_without_any_backward_is_empty_but_nothing_was_lost() -> None:
    loop = Loop()
    assert loop.step() == (False, False)


def test_a_backward_that_follows_clearing_reports_it() -> None:
    loop = Loop()
    assert loop.backward() is False
    assert loop.backward() is False  # accumulates
    loop.zero(is_called=False)
    assert loop.backward() is True


def test_an_optimizer_that_died_is_replaced_by_a_new_one_with_the_same_id() -> None:
    loop = Loop()
    loop.backward()
    loop.step()
    replaced = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.state._entries[id(replaced)] = loop.entry  # as if Python had given the new one the old one's address
    entry = loop.state.register(replaced)
    assert entry is not loop.entry
    assert entry.num_updates == 0
    assert entry.optimizer() is replaced


def test_gradients_are_read_only_in_the_thread_that_they_belong_to(tmp_path, monkeypatch):
    # Backward releases the GIL: whoever reads a gradient that another thread is writing ends the process.
    read: dict[int, set[int]] = {}
    gradients = OptimizerGradients.gradients

    def counted(entry):
        read.setdefault(entry.index, set()).add(threading.get_ident())
        return gradients(entry)

    both = threading.Barrier(2)

    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(30):
            both.wait()
            if number == 5:
                monkeypatch.setattr(OptimizerGradients, "gradients", counted)
            optimizer.zero_grad()
            both.wait()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()

    with sonde.DebugSession(to=tmp_path, strict=True).start():
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read) == 2
    assert [len(threads) for threads in read.values()] == [1, 1]
