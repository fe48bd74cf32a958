"""Sessions: what they accept, what `log` records, what a run holds of the training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from model_examples import BY_NAME


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(5, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = BY_NAME["mlp"].build()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("wrong", [None, 3, "model", [nn.Linear(1, 1)], nn.Linear, torch.ones(1)], ids=repr)
def test_what_is_not_a_model_is_refused_by_name(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(sonde.SondeError, match=rf"torch\.nn\.Module, not {type(wrong).__name__}"):
        sonde.watch(wrong, to=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_not_an_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for wrong in ([3], model.parameters(), "SGD"):
        with pytest.raises(sonde.SondeError, match=r"must be a torch\.optim\.Optimizer"):
            sonde.watch(model, wrong, to=tmp_path / "run")


def test_a_session_starts_once(pair: Any, tmp_path: Path) -> None:
    session = sonde.watch(*pair, to=tmp_path / "run")
    with pytest.raises(sonde.SondeError, match="started already"):
        session.start()
    session.close()


def test_a_report_before_anything_was_watched_is_a_clear_error() -> None:
    with pytest.raises(sonde.SondeError, match="nothing was watched"):
        sonde.debug_session().report()


def test_a_directory_that_holds_something_else_is_refused(pair: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(sonde.SondeError):
        sonde.watch(*pair, to=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_start_leaves_no_hook_behind(pair: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    backward = torch.autograd.backward
    with pytest.raises(sonde.SondeError):
        sonde.watch(*pair, to=tmp_path / "file")
    assert torch.autograd.backward is backward
    assert not any(module._forward_hooks for module in pair[0].modules())


def test_the_run_records_what_was_trained(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        losses = [one_step(model, optimizer).item() for _ in range(3)]
    run = sonde.Run(tmp_path / "run")
    (event,) = run.events("model")
    assert event.data["class"] == "Sequential"
    assert event.data["num_parameters"] == sum(p.numel() for p in model.parameters())
    (event,) = run.events("optimizer")
    assert event.data["class"] == "SGD"
    about = {"fused": None, "foreach": None, "momentum": 0.0, "device": "cpu"}
    assert event.data["groups"] == [{"lr": 0.1, "num_parameters": 6} | about]
    assert run.scalar("loss")[1] == pytest.approx(losses)
    assert run.scalar("lr")[1].tolist() == [0.1] * 3
    calls = {event.data["call"]: event.data for event in run.events("source")}
    assert set(calls) == {"forward", "backward", "zero_grad", "optimizer_step"}
    assert calls["backward"]["text"] == "loss.backward()"
    assert calls["backward"]["line"].startswith("test_session.py:")
    assert run.ended.how == "finished"


def test_log_records_numbers_tensors_and_texts_with_their_step(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        for step in range(3):
            loss = one_step(model, optimizer)
            session.log(accuracy=step / 10, loss_again=loss, nothing=math.nan, much=torch.tensor(7), remark="a text", flag=True)
    run = sonde.Run(tmp_path / "run")
    steps, values = run.series("log", "accuracy", "value")
    assert steps.tolist() == [0, 1, 2]
    assert values.tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert run.series("log", "loss_again", "value")[1] == pytest.approx(run.scalar("loss")[1])
    assert math.isnan(run.series("log", "nothing", "value")[1][0])
    assert run.series("log", "much", "value")[1].tolist() == [7, 7, 7]
    assert [(event.step, event.data["text"]) for event in run.events("log")] == [(0, "a text"), (1, "a text"), (2, "a text")]


def test_what_a_framework_logs_besides_numbers_is_passed_over_in_silence(pair: Any, tmp_path: Path, caplog: Any) -> None:
    model, optimizer = pair
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        one_step(model, optimizer)
        session.log_metrics({"loss": 1.0, "f1": np.float32(0.5), "rows": [1, 2], "nothing": None, "maps": torch.ones(3), 7: 2, "more": {}})
    assert sonde.Run(tmp_path / "run").logged == ["logged/loss", "f1", "7"]
    assert caplog.text == ""


def test_log_of_a_dictionary_gives_a_name_for_each_value(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        one_step(model, optimizer)
        session.log({"accuracy": 0.5, "val": {"loss": torch.tensor(0.25), "top": {5: 0.75}}})
        session.log(single=[3.0], array=np.array([2.0]), note={"on": "a text"})
    run = sonde.Run(tmp_path / "run")
    assert {name: run.scalar(name)[1].tolist() for name in run.logged} == {
        "accuracy": [0.5], "val/loss": [0.25], "val/top/5": [0.75], "single": [3.0], "array": [2.0],
    }  # fmt: skip
    assert [event.data["name"] for event in run.events("log")] == ["note/on"]


def test_log_of_what_is_not_one_number_says_once_what_to_log_instead(pair: Any, tmp_path: Path, caplog: Any) -> None:
    model, optimizer = pair
    endless: dict[str, Any] = {}
    endless["again"] = endless
    values = {"huge": 10**400, "odd": object(), "vector": torch.ones(3), "row": [1, 2], "table": np.ones((2, 2))}
    values["device"] = torch.ones(2, device="meta")
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        for _ in range(4):
            one_step(model, optimizer)
            session.log(0.9)
            session.log(values, none=None, empty=[], complex=1j, endless=endless, meta=torch.ones((), device="meta"), fine=1.0)
    run = sonde.Run(tmp_path / "run")
    assert run.logged == ["fine"]
    assert run.scalar("fine")[1].tolist() == [1.0] * 4
    assert "'vector': it was a tensor of 3 values" in caplog.text
    assert "for instance vector.mean(), or each value by its index, dict(enumerate(vector.flatten().tolist()))" in caplog.text
    assert "for instance sum(row) / len(row), or each value by its index, dict(enumerate(row))" in caplog.text
    assert "log it only in steps that have a value" in caplog.text
    assert "a value needs a name, as in session.log(accuracy=0.9)" in caplog.text
    assert len(caplog.records) == 12
    assert len({one.where for one in session.report().unobserved if one.where.startswith("session.log")}) == 12


def test_log_after_closing_is_ignored(pair: Any, tmp_path: Path) -> None:
    session = sonde.watch(*pair, to=tmp_path / "run")
    session.close()
    session.log(late=1.0)
    assert "log" not in sonde.Run(tmp_path / "run").kinds


def test_a_step_that_was_not_finished_is_written_when_the_session_closes(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        one_step(model, optimizer)
        model(torch.randn(5, 6)).square().mean().backward()
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("backwards")[1].tolist() == [1, 1]
    assert run.scalar("optimizer_steps")[1].tolist() == [1, 0]


def test_two_models_in_one_session_have_names_before_their_paths(tmp_path: Path) -> None:
    left, right = BY_NAME["mlp"].build(), BY_NAME["mlp"].build()
    both = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1)
    session = sonde.DebugSession(sonde.DebugConfig(every=1), to=tmp_path / "run", strict=True)
    with session.attach(left, both, name="left").attach(right, both, name="right"):
        both.zero_grad()
        (left(torch.ones(2, 6)) + right(torch.ones(2, 6))).sum().backward()
        both.step()
    run = sonde.Run(tmp_path / "run")
    names = {site.name for site in run.sites.values() if site.kind == "parameter"}
    assert {"0.weight", "right.0.weight"} <= names
    assert run.scalar("forwards")[1].tolist() == [2]


def test_what_is_switched_off_is_not_measured(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    config = sonde.DebugConfig(every=1, log_activations=False, log_gradients=False, log_weights=False)
    with sonde.watch(model, optimizer, to=tmp_path / "run", config=config, strict=True):
        one_step(model, optimizer)
    run = sonde.Run(tmp_path / "run")
    assert {"activation", "activation_gradient", "gradient", "parameter", "update"}.isdisjoint(run.kinds)
    assert run.scalar("grad_norm")[1][0] > 0  # the guard is not a matter of taste


def test_parameters_that_no_optimizer_holds_are_listed(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        one_step(model, optimizer)
    (event,) = sonde.Run(tmp_path / "run").events("membership")
    assert event.data["unowned"] == ["2.weight", "2.bias", "4.weight", "4.bias"]


def test_the_same_directory_again_is_a_second_attempt_of_the_same_run(tmp_path: Path) -> None:
    for num_steps in (3, 5):
        model = BY_NAME["mlp"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
            for _ in range(num_steps):
                one_step(model, optimizer)
    run = sonde.Run(tmp_path / "run")
    assert [process.last_step for process in run.processes] == [2, 4]


def test_stop_judges_the_run(pair: Any, tmp_path: Path) -> None:
    session = sonde.watch(*pair, to=tmp_path / "run", every=1, strict=True)
    one_step(*pair)
    report = session.stop()
    assert isinstance(report, sonde.Report)


def test_a_training_with_a_nan_records_its_start_and_the_time_that_it_waited(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run"):
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).sum()
            (loss.log() * 0 if step == 4 else loss * float("nan") if step == 5 else loss).backward()
            optimizer.step()
    cost = sonde.diagnose(tmp_path / "run").overhead
    assert cost.startup_ms > 0
    assert cost.num_incidents >= 1
    assert cost.incidents_ms > 0
