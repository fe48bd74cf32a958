"""Numbers of the user's own with the steps, and conditions that turn switches on for a while."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.capture.switches.conditional_switches import Triggers  # noqa: E402
from step_trackers import new_tracker  # noqa: E402

pytestmark = pytest.mark.torch


def train(to: Path, prepare: Callable[[sonde.DebugSession], object], *, steps: int = 30, odd: dict[int, float] | None = None,
          strict: bool = True, after: Callable[[sonde.DebugSession, int], object] | None = None) -> None:  # fmt: skip
    """`odd` multiplies the loss of some steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with sonde.watch(model, optimizer, to=to, strict=strict) as session:
        prepare(session)
        for step in range(steps):
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 3)) - 2).square().mean() * (odd or {}).get(step, 1.0)
            loss.backward()
            optimizer.step()
            if after is not None:
                after(session, step)


def flips(path: Path, switch: str) -> list[tuple[int, bool]]:
    return [(event.step, event.data["on"]) for event in sonde.Run(path).events("switch") if event.data["switch"] == switch]


# -- metrics -------------------------------------------------------------------------------------------


def test_a_metric_is_recorded_with_its_steps(tmp_path: Path) -> None:
    numbers = iter(range(100))
    train(tmp_path / "run", lambda session: session.metric("counted", lambda: next(numbers), every=4), steps=10)
    steps, values = sonde.Run(tmp_path / "run").series("log", "counted", "value")
    assert steps.tolist() == [0, 4, 8]
    assert values.tolist() == [0, 1, 2]


def test_a_metric_may_ask_the_session(tmp_path: Path) -> None:
    def on(session: sonde.DebugSession) -> int:
        return sum(state["on"] for state in session.get_debugging_status().values())

    def prepare(session: sonde.DebugSession) -> None:
        session.enable_debugging(["backward_pass", "lr_scheduling"])
        session.metric("switches on", on)

    train(tmp_path / "run", prepare, steps=3)
    assert sonde.Run(tmp_path / "run").series("log", "switches on", "value")[1].tolist() == [2, 2, 2]


def test_what_a_metric_does_with_a_model_is_not_training(tmp_path: Path) -> None:
    other = nn.Linear(3, 1)

    def metric() -> torch.Tensor:
        loss = other(torch.ones(1, 3)).sum()
        loss.backward()
        return loss.detach()

    train(tmp_path / "run", lambda session: session.metric("other", metric), steps=4)
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("backwards")[1].tolist() == [1] * 4
    assert len(run.series("log", "other", "value")[0]) == 4


def test_a_metric_that_fails_is_taken_out_and_the_training_goes_on(tmp_path: Path) -> None:
    asked = []

    def metric() -> float:
        asked.append(1)
        raise ZeroDivisionError("nothing to divide")

    train(tmp_path / "run", lambda session: session.metric("broken", metric), steps=10, strict=False)
    run = sonde.Run(tmp_path / "run")
    assert len(asked) == 3
    assert [event.data["where"] for event in run.events("retired")] == ["broken"]
    assert len(run.scalar("loss")[0]) == 10


def test_a_metric_that_returns_something_else_than_one_number_says_so_once_and_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results: dict[str, Any] = {"several": torch.ones(3), "nothing": None, "text": "x", "row": [1, 2], "val": {"loss": 0.5}}
    sometimes = iter([None, 1.0, None, 2.0])

    def prepare(session: sonde.DebugSession) -> None:
        for name, result in results.items():
            session.metric(name, lambda result=result: result)
        session.metric("sometimes", lambda: next(sometimes))

    train(tmp_path / "run", prepare, steps=4)
    run = sonde.Run(tmp_path / "run")
    assert sorted(run.logged) == ["sometimes", "val/loss"]
    assert run.scalar("sometimes")[1].tolist() == [1.0, 2.0]
    assert "session.metric does not record 'several': it was a tensor of 3 values" in caplog.text
    notes = [event.data["where"] for event in run.events("unobserved") if event.data["probe"] == "session.metric"]
    assert sorted(notes) == ["nothing", "row", "several", "sometimes", "text"]
    assert not list(run.events("retired"))


# -- conditions ------------------------------------------------------------------------------------------


def test_a_condition_turns_switches_on_for_a_while(tmp_path: Path) -> None:
    train(tmp_path / "run", lambda session: session.when("step == 5", then=["gradient_norms"], for_steps=4))
    assert flips(tmp_path / "run", "gradient_norms") == [(6, True), (10, False)]
    (event,) = sonde.Run(tmp_path / "run").events("condition")
    assert (event.step, event.data["condition"], event.data["then"]) == (5, "step == 5", ["gradient_norms"])


def test_switches_stay_on_while_their_condition_holds(tmp_path: Path) -> None:
    train(tmp_path / "run", lambda session: session.when("5 <= step < 9", then="gradient_norms", for_steps=3))
    assert flips(tmp_path / "run", "gradient_norms") == [(6, True), (12, False)]


def test_a_switch_that_the_user_has_on_stays_on(tmp_path: Path) -> None:
    def prepare(session: sonde.DebugSession) -> None:
        session.enable_debugging("backward_pass")
        session.when("step == 5", then=["backward_pass", "lr_scheduling"], for_steps=2)

    train(tmp_path / "run", prepare, steps=20)
    assert flips(tmp_path / "run", "backward_pass") == [(0, True), (20, False)]  # at the end all go off
    assert flips(tmp_path / "run", "lr_scheduling") == [(6, True), (8, False)]


NAMED: dict[str, dict[int, float]] = {"loss_spike": {60: 1000.0}, "gradient_spike": {60: 1000.0}, "nonfinite": {60: math.nan}}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_condition_holds_when_it_happens_and_not_before(name: str, tmp_path: Path) -> None:
    train(tmp_path / "run", lambda session: session.when(name, then=["backward_pass"], for_steps=3), steps=64, odd=NAMED[name])
    assert flips(tmp_path / "run", "backward_pass")[0] == (61, True)
    assert len([1 for event in sonde.Run(tmp_path / "run").events("condition")]) == 1


def test_a_slow_step_is_one_that_takes_much_longer_than_the_others(tmp_path: Path) -> None:
    tracker, session = new_tracker(tmp_path), sonde.debug_session()
    triggers = Triggers(session._switches, session)
    triggers.add_trigger("slow_step", ("validation",), 1)
    for step, ms in enumerate([50, 40, 10, 10, 10, 10, 10, 10, 10, 10, 11, 14, 60, 10]):
        tracker.state.number = step
        triggers.on_step_end(tracker.context, ms * 1_000_000)
    tracker.recorder.flush()
    tracker.recorder.writer.close()
    assert [event.step for event in sonde.Run(tmp_path).events("condition")] == [12]


WRONG: dict[str, tuple[Callable[[sonde.DebugSession], Any], str]] = {
    "an unknown switch": (lambda session: session.when("nonfinite", then=["gradient_nroms"]), "gradient_norms"),
    "no switch": (lambda session: session.when("nonfinite", then=[]), "nothing would happen"),
    "an unknown name": (lambda session: session.when("losss > 3", then="validation"), "loss"),
    "a name of layers": (lambda session: session.when("zero_share > 0.5", then="validation"), "zero_share"),
    "no steps": (lambda session: session.when("nonfinite", then="validation", for_steps=0), "for_steps"),
    "no function": (lambda session: session.metric("x", 3), "function"),  # type: ignore[arg-type]
    "no name": (lambda session: session.metric("", lambda: 1), "name"),
    "never": (lambda session: session.metric("x", lambda: 1, every=0), "every"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_meant_is_refused(case: str) -> None:
    ask, message = WRONG[case]
    with pytest.raises(sonde.SondeError, match=message):
        ask(sonde.debug_session())
