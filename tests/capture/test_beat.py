"""The quick way through an ordinary step writes the same run as the loop's own methods."""

from __future__ import annotations

import gc
import math
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde
from sonde import spike_detection
from sonde.capture import beat, call_site, patches
from sonde.capture.probes import base
from sonde.capture.step_profiler import step_profiler
from sonde.capture.step_tracker import Loop
from sonde.runlog import writer

pytestmark = [pytest.mark.torch, pytest.mark.skipif(beat.Beat is None, reason="the native kernel was not built")]

STEPS = 90
PHASES = ("data", "transfer", "forward", "backward", "optimizer", "checkpoint", "validation", "other", "sonde")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))


def plain(step: Callable[..., None]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(STEPS):
        step(model, optimizer, number, torch.randn(5, 6))


def ordinary(model, optimizer, number, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def evaluated_between(model, optimizer, number, x):
    ordinary(model, optimizer, number, x)
    if number % 10 == 9:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()


def accumulated(model, optimizer, number, x):
    for _ in range(3):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def never_cleared(model, optimizer, number, x):
    model(x).square().mean().backward()
    optimizer.step()


def clipped_and_cleared_by_the_model(model, optimizer, number, x):
    model.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def cleared_by_the_model(model, optimizer, number, x):
    model.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def by_closure(model, optimizer, number, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def by_closure_that_changes_gradients(model, optimizer, number, x):
    """By clipping, in place, behind torch's back, or by others in their place: now and then not at all."""

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        gradient = model[0].weight.grad
        match number % 5:
            case 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            case 2:
                gradient[1:2] *= 3
            case 3:
                gradient.data.mul_(3)
            case 4:
                model[0].weight.grad = gradient * 3
        return loss

    optimizer.step(closure)


def bad_at_the_end(model, optimizer, number, x):
    ordinary(model, optimizer, number, x * math.inf if number == STEPS - 10 else x)


def spiking(model, optimizer, number, x):
    ordinary(model, optimizer, number, x * 1e4 if number == STEPS - 10 else x)


def without_gradients_now_and_then(model, optimizer, number, x):
    optimizer.zero_grad()
    if number % 7:
        model(x).square().mean().backward()
    optimizer.step()


def two_losses(model, optimizer, number, x):
    optimizer.zero_grad()
    out = model(x)
    out.abs().mean().backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()


def failing_forward(model, optimizer, number, x):
    if number % 9 == 5:
        with pytest.raises(RuntimeError):
            model(x[:, :3])
    ordinary(model, optimizer, number, x)


def parameters_in_two_groups() -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 0.5}], lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for number in range(STEPS):
        ordinary(model, optimizer, number, torch.randn(5, 6))
        schedule.step()


def two_networks() -> None:
    first, second = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (first, second)]
    for number in range(STEPS):
        for model, optimizer in zip((first, second), optimizers):
            ordinary(model, optimizer, number, torch.randn(5, 6))


def scaled() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=20)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 6)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def scaled_at_first() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6)).square().mean()
        if number < 43:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()


def from_a_loader() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(STEPS, 6), batch_size=4)
    for _ in range(4):
        for number, x in enumerate(loader):
            ordinary(model, optimizer, number, x)


STEP_FUNCTIONS = [
    ordinary, evaluated_between, accumulated, never_cleared, clipped_and_cleared_by_the_model, cleared_by_the_model, by_closure,
    by_closure_that_changes_gradients, bad_at_the_end, spiking, without_gradients_now_and_then, two_losses, failing_forward,
]  # fmt: skip
PROGRAMS = {step.__name__: (lambda step=step: plain(step)) for step in STEP_FUNCTIONS}
PROGRAMS |= {program.__name__: program for program in (parameters_in_two_groups, two_networks, scaled, scaled_at_first, from_a_loader)}


def watched(program: Callable[[], None], to: Path, every: int = 13) -> sonde.Run:
    torch.manual_seed(3)
    with sonde.DebugSession(sonde.DebugConfig(every=every), to=to, strict=True).start() as session:
        session._loop.single_closures = True
        program()
    return sonde.Run(to)


def scalars(run: sonde.Run) -> list[str]:
    return [site.path for site in run.sites.values() if site.kind == "scalar"]


def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of the loop's own methods is called, on a machine on which no step is slow by chance."""
    monkeypatch.setattr(step_profiler, "SLOW_NS", 10**12)
    heard: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            heard[name] += 1
            method(*args)

        return call

    for name in (*beat.CALLS, "end_plain_step"):
        monkeypatch.setattr(Loop, name, counted(name, getattr(Loop, name)))
    return heard


def events(run: sonde.Run) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in run.events() if event.kind not in ("xray", "memory")]


def test_a_closure_that_runs_once_takes_the_quick_way_too(tmp_path, monkeypatch):
    heard = count(monkeypatch)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "quick", every=10_000) as session:
        session._loop.single_closures = True
        for number in range(STEPS):
            if number == 40:
                heard.clear()
            by_closure(model, optimizer, number, torch.randn(5, 6))
    assert heard["optimizer_begins"] + heard["forward_begins"] + heard["backward_ended"] + heard["optimizer_ended"] <= 8
    assert heard["backward_begins"] + heard["end_plain_step"] <= (STEPS - 40) / 2
    assert sum(sonde.Run(tmp_path / "quick").scalar("optimizer_steps")[1]) == STEPS


def statistics(run: sonde.Run) -> list[tuple[str, int, list[int], list[float]]]:
    """All that was measured of tensors."""
    frames = [(kind, frame) for kind in run.kinds if kind not in ("step", "log") for frame in run.frames(kind)]
    return [(kind, frame.step, list(frame.sites), frame.values.ravel().tolist()) for kind, frame in frames]


@pytest.mark.parametrize("every", [1, 13])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_by_the_quick_way_is_the_run_by_the_slow_one(name, every, tmp_path, monkeypatch):
    quick = watched(PROGRAMS[name], tmp_path / "quick", every)
    monkeypatch.setattr(beat, "Beat", None)
    slow = watched(PROGRAMS[name], tmp_path / "slow", every)
    assert quick.last_step == slow.last_step
    assert not quick.damage
    assert scalars(quick) == scalars(slow)
    for series in sorted(name for name in scalars(slow) if not name.endswith(("_ms", "_mb"))):
        (steps, expected), (given_steps, given) = slow.scalar(series), quick.scalar(series)
        assert list(given_steps) == list(steps)
        assert list(given) == pytest.approx(list(expected), rel=1e-6, nan_ok=True), series
    assert events(quick) == events(slow)
    for given_frame, expected_frame in zip(statistics(quick), statistics(slow), strict=True):
        assert given_frame[:3] == expected_frame[:3]
        assert given_frame[3] == pytest.approx(expected_frame[3], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("every", [1, 10_000], ids=["observed", "unobserved"])
def test_most_ordinary_steps_run_no_python_of_the_loop(every, tmp_path, monkeypatch):
    heard = count(monkeypatch)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path, every=every):
        for number in range(STEPS):
            if number == 40:
                heard.clear()
            ordinary(model, optimizer, number, torch.randn(5, 6))
    num = STEPS - 40
    assert heard["zero_grad"] + heard["forward_begins"] + heard["forward_ended"] + heard["backward_ended"] <= 8
    assert heard["backward_begins"] + heard["optimizer_begins"] + heard["end_plain_step"] <= num / 2


def test_phases_and_our_own_time_add_up_to_the_step_by_the_quick_way(tmp_path):
    run = watched(PROGRAMS["from_a_loader"], tmp_path)
    parts = [f"{phase}_ms" for phase in PHASES if f"{phase}_ms" in scalars(run)]
    totals = [sum(values) for values in zip(*(list(run.scalar(name)[1]) for name in parts))]
    looked_at = {event.step for event in run.events("xray")}  # line by line: what that costs is an estimate
    expected = list(run.scalar("step_ms")[1])
    for step in set(range(1, len(expected))) - looked_at:
        assert totals[step] == pytest.approx(expected[step], rel=1e-3, abs=0.02)


def test_times_that_nobody_wants_are_not_written(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path, config=sonde.DebugConfig(log_performance=False)):
        for number in range(STEPS):
            ordinary(model, optimizer, number, torch.randn(5, 6))
    assert all(math.isnan(value) for value in sonde.Run(tmp_path).scalar("forward_ms")[1])


def test_the_kernel_counts_with_the_same_numbers_as_python():
    from sonde.capture import _kernel

    assert _kernel.LEARNT == call_site.LINES_LEARNT
    assert _kernel.CHECKED_EVERY == call_site.CHECKED_EVERY
    assert (_kernel.RENEWED, _kernel.WINDOW) == (spike_detection.RENEWED, spike_detection.WINDOW)
    assert (_kernel.NOW_AND_THEN, _kernel.RARELY, _kernel.LONG_RUN) == (base.NOW_AND_THEN, base.RARELY, base.LONG_RUN)
    assert _kernel.SETTLED == step_profiler.SETTLED
    assert _kernel.UNLINKED_CHECK == writer.UNLINKED_CHECK


def test_a_forked_child_writes_nothing_even_where_it_is_heard(tmp_path):
    """The switchboard is deaf in a child; the file is the parent's all the same."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000):
        for number in range(STEPS):
            ordinary(model, optimizer, number, torch.randn(5, 6))
        listeners = patches._listeners
        child = os.fork()
        if child == 0:
            try:
                patches._listeners = listeners
                for number in range(5):
                    ordinary(model, optimizer, number, torch.randn(5, 6))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    assert len(sonde.Run(tmp_path).scalar("loss")[1]) == STEPS


def test_a_closed_session_leaves_nothing_behind(tmp_path):
    model = net()
    session = sonde.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), to=tmp_path)
    loop = weakref.ref(session._loop)
    session.close()
    del session
    gc.collect()
    assert loop() is None


def test_what_the_kernel_reads_in_every_step_has_a_slot(tmp_path):
    """Without one, everything goes on working, and a step costs more again."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path) as session:
        ordinary(model, optimizer, 0, torch.randn(5, 6))
        loop = session._loop
        assert loop is not None
        (account,) = loop.ledger.accounts.values()
        parts = {"loop": loop, "clock": loop.clock, "ledger": loop.ledger, "account": account, "kept": loop.kept, "losses": loop._losses}
        parts |= {"lines": loop._lines, "guard": loop._guard, "spikes": loop._spikes, "evaluations": loop._evaluations, "far": loop._far}
        parts |= {"models": loop._models, "governor": loop._governor, "xray": loop.xray, "journal": loop._journal}
        parts |= {"writer": loop._journal.writer, "watched": next(iter(loop._models)), "recent": loop._spikes._losses["loss"]}
    source = "".join(path.read_text() for path in Path(beat.__file__).parent.glob("_kernel_*.h"))
    read = set(re.findall(r"\b(?:peek|says|whole|real|put|put_whole|put_float|is_empty)\((?:self->)?(\w+), n_(\w+)", source))
    told = [(part, name) for part, name in read if part in parts]
    assert len(told) > 80
    assert [f"{part}.{name}" for part, name in told if not isinstance(getattr(type(parts[part]), name, None), MemberDescriptorType)] == []


def test_the_bound_of_what_is_usual_is_renewed_by_the_quick_way_too(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000) as session:
        for number in range(STEPS):
            ordinary(model, optimizer, number, torch.randn(5, 6))
        assert session._loop is not None
        found = session._loop._spikes._losses["loss"]
    expected = spike_detection.Losses()
    for loss in sonde.Run(tmp_path).scalar("loss")[1]:
        expected.see(float(loss))
    assert (found.bound, found.median) == pytest.approx((expected.bound, expected.median), rel=1e-5)
