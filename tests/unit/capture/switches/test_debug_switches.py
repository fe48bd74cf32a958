"""The thirteen switches: each has its effect, all are live, they report what they cost, and none changes the training or stays behind."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sonde  # noqa: E402
from sonde.capture.switches import debug_switches as switches_module  # noqa: E402
from sonde.capture.training_callbacks import subscribers  # noqa: E402
from sonde.config import DebugConfig  # noqa: E402
from sonde.runlog.switch_file import SWITCHES, SWITCHES_FILE, write_switch_requests  # noqa: E402

pytestmark = pytest.mark.torch

Flip = Callable[[sonde.DebugSession, int], object]
REPORTING = [name for name in SWITCHES if name not in ("autograd_anomaly", "autograd_profiler", "tensorboard_profiler")]


def train(
    to: Path | None, flip: Flip = lambda session, step: None, *, steps: int = 12, config: DebugConfig | None = None
) -> tuple[list[float], nn.Module, sonde.DebugSession | None]:
    """Losses, the model and the session. `flip` is called before the first step (with -1) and after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(TensorDataset(torch.randn(4 * steps, 6)), batch_size=4)
    session = sonde.watch(model, optimizer, to=to, config=config, strict=True) if to else None
    losses = []
    if session:
        flip(session, -1)
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        losses.append(loss.item())
        if session:
            flip(session, step)
    if session:
        session.close()
    return losses, model, session


def at(step: int, what: Callable[[sonde.DebugSession], object]) -> Flip:
    return lambda session, now: what(session) if now == step else None


def reports(caplog: pytest.LogCaptureFixture, switch: str) -> list[dict[str, Any]]:
    return [record.sonde for record in caplog.records if record.name == f"sonde.{switch}"]  # type: ignore[attr-defined]


# -- what each reports ----------------------------------------------------------------------------------

FIELDS: dict[str, set[str]] = {
    "memory_usage": {
        "rss_mb", "parameters_mb", "gradients_mb", "optimizer_state_mb", "system_available_mb", "system_limit_mb", "device",
    },
    "gradient_norms": {"grad_norm", "largest", "smallest", "num_not_finite"},
    "forward_pass": {"forwards", "forward_ms", "inputs", "outputs", "loss", "device"},
    "backward_pass": {"backwards", "backward_ms", "loss", "grad_norm", "not_finite", "update_norm", "update_share"},
    "device_placement": {"parameters", "inputs", "optimizer_state", "transfer_ms"},
    "mixed_precision": {
        "autocast", "autocast_dtype", "scaler", "loss_scale", "skipped", "skipped_so_far", "parameters", "gradients", "inputs",
    },
    "data_loading": {
        "dataset", "num_samples", "num_batches", "batch_size", "num_workers", "splits", "data_ms", "data_share", "inputs",
    },
    "validation": {"num_batches", "num_samples", "validation_ms", "rss_mb"},
    "early_stopping": {"watches", "value", "best", "best_step", "steps_since_best"},
    "lr_scheduling": {"lr", "scheduler", "scheduler_steps", "changed"},
}  # fmt: skip


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run with all of the reporting switches on, and the lines that it wrote."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("sonde").addHandler(handler)
    path = tmp_path_factory.mktemp("run") / "run"
    losses, model, _ = train(path, at(-1, lambda session: session.enable_debugging(REPORTING)))
    logging.getLogger("sonde").removeHandler(handler)
    return losses, model, path, records


@pytest.mark.parametrize("switch", REPORTING)
def test_a_switch_writes_structured_lines_under_its_name(switch: str, everything: Any) -> None:
    lines = [record for record in everything[3] if record.name == f"sonde.{switch}"]
    assert len(lines) >= 2
    assert set(lines[0].sonde) == FIELDS[switch] | {"step"}
    assert lines[0].getMessage().startswith(f"sonde: {switch}, step ")


def line(everything: Any, switch: str, number: int = 0) -> dict[str, Any]:
    return [record for record in everything[3] if record.name == f"sonde.{switch}"][number].sonde  # type: ignore[no-any-return]


def test_the_lines_hold_the_right_values(everything: Any) -> None:
    losses, model, _, _ = everything
    assert line(everything, "backward_pass", 1)["loss"] == pytest.approx(losses[1])
    forward = line(everything, "forward_pass")
    assert (forward["inputs"], forward["outputs"], forward["device"]) == ({"input": "4x6"}, {"output": "4x1"}, "cpu")
    assert forward["loss"] == pytest.approx(losses[0])
    data = line(everything, "data_loading")
    assert (data["dataset"], data["num_samples"], data["batch_size"], data["num_workers"]) == ("TensorDataset", 48, 4, 0)
    assert line(everything, "validation")["num_samples"] == 4
    assert [line(everything, "lr_scheduling", i)["scheduler"] for i in (0, 1)] == ["one that has not stepped yet", "StepLR"]
    mixed = line(everything, "mixed_precision")
    assert (mixed["autocast"], mixed["autocast_dtype"], mixed["scaler"]) == ("off", "none", "none")
    assert line(everything, "device_placement")["parameters"] == {"cpu": 4}
    assert line(everything, "mixed_precision")["gradients"] == {"float32": 4}
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert line(everything, "memory_usage")["parameters_mb"] * 2**20 == num_bytes
    assert line(everything, "memory_usage")["gradients_mb"] * 2**20 == num_bytes
    assert line(everything, "early_stopping", 2)["best"] == pytest.approx(min(losses[:3]))
    assert line(everything, "lr_scheduling")["lr"] == 0.01
    assert [entry["step"] for entry in (line(everything, "validation", i) for i in (0, 1, 2))] == [4, 8, 12]  # 12: after the last step


def test_the_norms_of_gradients_are_those_of_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    norms: dict[str, float] = {}
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        session.enable_debugging("gradient_norms")
        model(torch.randn(4, 6)).square().mean().backward()
        norms |= {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    (report,) = reports(caplog, "gradient_norms")
    largest, smallest = (pick(norms, key=norms.__getitem__) for pick in (max, min))
    assert report["largest"] == f"{largest} {norms[largest]:.4g}"
    assert report["smallest"] == f"{smallest} {norms[smallest]:.4g}"
    assert report["grad_norm"] == pytest.approx(sum(norm**2 for norm in norms.values()) ** 0.5, rel=1e-5)
    assert sonde.Run(tmp_path / "run").series("log", "gradient_norms.largest", "value")[1] == pytest.approx([norms[largest]], rel=1e-5)


def test_numbers_that_a_run_would_not_have_are_in_it(everything: Any) -> None:
    run = sonde.Run(everything[2])
    assert len(run.scalar("rss_mb")[0]) == len(run.scalar("optimizer_state_mb")[0]) == 12
    assert all(value > 0 for value in run.scalar("rss_mb")[1])
    assert len(run.series("log", "early_stopping.steps_since_best", "value")[0]) == 12
    assert [event.data["parameters"] for event in run.events("placement")] == [{"cpu": 4}]


def test_early_stopping_reads_a_validation_loss_that_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def flip(session: sonde.DebugSession, step: int) -> None:
        session.enable_debugging(["early_stopping"])
        if step >= 0:
            session.log(val_loss=float(abs(step - 1)))

    train(tmp_path / "run", flip, steps=4)
    assert reports(caplog, "early_stopping")[-1]["watches"] == "val_loss"


def test_lines_are_json_where_that_is_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", at(-1, lambda session: session.enable_debugging("mixed_precision")), steps=2, config=DebugConfig(log_json=True))
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "sonde.mixed_precision"]
    assert lines[0]["switch"] == "mixed_precision"
    assert lines[0]["loss_scale"] == "NaN"  # strict JSON


def test_lines_are_few_and_none_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonde.capture.switches.rate_limited_log.PAUSE_NS", 10**15)  # longer than any test
    _, _, session = train(tmp_path / "run", at(-1, lambda session: session.enable_debugging("backward_pass")))
    assert [report["step"] for report in reports(caplog, "backward_pass")] == [0, 1, 2]
    monkeypatch.setattr("sonde.capture.switches.rate_limited_log.PAUSE_NS", 0)
    train(tmp_path / "again", at(-1, lambda session: session.enable_debugging("backward_pass")))
    assert len(reports(caplog, "backward_pass")) == 3 + 12
    assert session is not None
    assert session.get_debugging_status()["backward_pass"]["num_lines"] == 3


def test_a_switch_that_is_turned_on_again_writes_its_next_line_at_once_unless_a_condition_did_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.capture.switches.rate_limited_log.PAUSE_NS", 10**15)

    def flip(session: sonde.DebugSession, step: int) -> None:
        if step in (-1, 7):
            session.enable_debugging("backward_pass")
        if step == 5:
            session.disable_debugging("backward_pass")
            session.when("step == 6", then="gradient_norms", for_steps=1)
            session.when("step == 9", then="gradient_norms", for_steps=1)

    train(tmp_path / "run", flip)
    assert [report["step"] for report in reports(caplog, "backward_pass")] == [0, 1, 2, 8]
    assert len(reports(caplog, "gradient_norms")) <= 3


class Classifier(nn.Module):
    """Called as models of transformers are: inputs by name, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, batch: dict[str, torch.Tensor], labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head((self.embedding(batch["input_ids"]) * batch["attention_mask"][..., None]).mean(1))
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def test_inputs_splits_and_precision_of_a_training_with_dicts_a_scaler_and_a_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = TensorDataset(torch.randint(0, 20, (24, 5)), torch.ones(24, 5), torch.randint(0, 2, (24,)))
    training, validation = torch.utils.data.random_split(data, [16, 8])
    names = ["forward_pass", "mixed_precision", "data_loading", "validation"]
    config = DebugConfig(**{f"debug_{name}": True for name in names})  # type: ignore[arg-type]
    with sonde.watch(model, optimizer, to=tmp_path / "run", config=config, strict=True) as session:
        assert session.get_debugging_status()["forward_pass"] | {"cost_ms": 0} == {
            "on": True, "since_step": 0, "by": "config", "cost_ms": 0, "num_lines": 0,
        }  # fmt: skip
        for _ in range(2):
            for ids, mask, labels in DataLoader(training, batch_size=8):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
                    loss = model({"input_ids": ids, "attention_mask": mask}, labels=labels)["loss"]
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            with torch.no_grad():
                for ids, mask, labels in DataLoader(validation, batch_size=3):
                    model({"input_ids": ids, "attention_mask": mask}, labels)
    forward = reports(caplog, "forward_pass")[0]
    assert forward["inputs"] == {"input_ids": "8x5", "attention_mask": "8x5", "labels": "8"}
    assert forward["outputs"] == {"loss": "scalar", "logits": "8x2"}
    mixed = reports(caplog, "mixed_precision")[0]
    assert (mixed["autocast"], mixed["autocast_dtype"], mixed["scaler"], mixed["loss_scale"]) == ("on", "bfloat16", "GradScaler", 1024.0)
    data_loading = reports(caplog, "data_loading")
    assert data_loading[0]["dataset"] == "Subset of TensorDataset"
    assert data_loading[2]["splits"] == {"train": 16, "validation": 8}
    assert (data_loading[2]["num_samples"], data_loading[2]["num_batches"], data_loading[2]["batch_size"]) == (16, 2, 8)
    evaluations = reports(caplog, "validation")
    assert [(report["step"], report["num_batches"], report["num_samples"]) for report in evaluations] == [(2, 3, 8), (4, 3, 8)]
    assert all(report["rss_mb"] > 0 for report in evaluations)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_size_of_an_update_is_the_distance_that_the_parameters_moved(
    optimizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    steps = optimizer(model.parameters(), lr=0.01)
    with sonde.watch(model, steps, to=tmp_path / "run", strict=True, config={"debug_backward_pass": True}):
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        model(torch.randn(4, 6, dtype=torch.double)).square().mean().backward()
        steps.step()
        moved = (nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm()
    (report,) = reports(caplog, "backward_pass")
    assert report["update_norm"] == pytest.approx(float(moved))
    assert report["update_share"] == pytest.approx(float(moved / before.norm()))


def test_gradients_that_are_not_finite_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", config={"debug_backward_pass": True, "enable_anomaly_detection": False}):
        model(torch.ones(1, 2)).sum().backward()
        model[1].weight.grad[0, 0] = torch.nan
        optimizer.step()
    assert reports(caplog, "backward_pass")[0]["not_finite"] == "1.weight"


def test_every_change_of_a_learning_rate_is_written_also_after_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.capture.switches.rate_limited_log.PAUSE_NS", 10**15)  # longer than any test
    train(tmp_path / "run", config=DebugConfig(debug_lr_scheduling=True))
    changes = [(report["step"], report["changed"]) for report in reports(caplog, "lr_scheduling") if report["changed"] != "none"]
    assert changes == [(4, "lr from 0.01 to 0.005"), (8, "lr from 0.005 to 0.0025"), (12, "lr from 0.0025 to 0.00125")]


def test_a_switch_is_off_at_once_after_an_evaluation_and_inside_of_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.capture.switches.rate_limited_log.PAUSE_NS", 0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        for step in range(6):
            if step in (0, 3):
                session.enable_debugging()
            with torch.no_grad():
                model(torch.ones(1, 2))
            if step == 2:
                session.disable_debugging()
                assert not any(state["on"] for state in session.get_debugging_status().values())
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if step == 5:
                session.disable_debugging()
                assert not any(state["on"] for state in session.get_debugging_status().values())
                assert not torch.is_anomaly_enabled()
            optimizer.step()
    assert [report["step"] for report in reports(caplog, "backward_pass")] == [0, 1, 3, 4]
    assert [report["step"] for report in reports(caplog, "validation")] == [0, 1, 3, 4]


def test_switches_that_are_no_names_are_refused(tmp_path: Path) -> None:
    session = sonde.DebugSession({"level": "basic"}, to=tmp_path / "run")
    for change in (session.enable_debugging, session.disable_debugging):
        for given in (3, {"memory_usage": False}):
            with pytest.raises(sonde.SondeError, match=r"switches are given by name.*not (3|\{)"):
                change(given)  # type: ignore[arg-type]


# -- torch's own -----------------------------------------------------------------------------------------


def anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


@pytest.mark.parametrize("before", [(False, True), (True, True), (True, False)], ids=["off", "on", "on without checks"])
def test_the_anomaly_mode_is_on_while_its_switch_is_and_then_as_the_user_had_it(before: tuple[bool, bool], tmp_path: Path) -> None:
    modes = []

    def flip(session: sonde.DebugSession, step: int) -> None:
        if step == 2:
            session.enable_debugging("autograd_anomaly")
        if step == 5:
            session.disable_debugging("autograd_anomaly")
        modes.append(torch.is_anomaly_enabled())

    torch.autograd.set_detect_anomaly(*before)
    try:
        train(tmp_path / "run", flip, steps=8)
        assert modes == [before[0]] * 3 + [True] * 3 + [before[0]] * 3
        assert anomaly() == before
        train(tmp_path / "closed", at(2, lambda session: session.enable_debugging("autograd_anomaly")), steps=4)
        assert anomaly() == before
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("mode", ["warn", "raise"])
def test_the_anomaly_mode_stops_at_a_nan_only_where_that_is_wanted(mode: str, tmp_path: Path) -> None:
    with sonde.watch(nn.Linear(1, 1), to=tmp_path / "run", config=DebugConfig(anomaly_detection_mode=mode)) as session:
        session.enable_debugging("autograd_anomaly")
        assert anomaly() == (True, mode == "raise")
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(("switch", "ending"), [("autograd_profiler", ".json.gz"), ("tensorboard_profiler", ".pt.trace.json.gz")])
def test_a_profiler_writes_a_trace_of_the_next_steps_and_turns_itself_off(
    switch: str, ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.capture.switches.torch_profiler_switch.NUM_STEPS", 3)
    train(tmp_path / "run", at(3, lambda session: session.enable_debugging(switch)))
    run = sonde.Run(tmp_path / "run")
    (event,) = run.events("profile")
    assert event.data["num_steps"] == 3
    assert any(name.startswith("aten::") for name in event.data["ms_per_step"])
    trace = tmp_path / "run" / event.data["trace"]
    assert trace.name.startswith("steps-000005-000007") or trace.name.startswith("steps-000004-000006")
    assert trace.name.endswith(ending)
    names = [entry.get("name") for entry in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("aten::addmm") in range(6, 10)  # two layers, three steps, a validation or two
    assert [(flip.data["on"], flip.data["by"]) for flip in run.events("switch")] == [(True, "session"), (False, "profile written")]
    assert len(reports(caplog, switch)) == 1
    assert not torch._C._autograd._profiler_enabled()


def test_a_profiler_that_is_on_when_the_training_ends_is_written(tmp_path: Path) -> None:
    train(tmp_path / "run", at(0, lambda session: session.enable_debugging("autograd_profiler")), steps=5)
    (event,) = sonde.Run(tmp_path / "run").events("profile")
    assert 1 <= event.data["num_steps"] < 5
    assert not torch._C._autograd._profiler_enabled()


def test_a_profiler_of_the_user_goes_first(tmp_path: Path) -> None:
    with torch.profiler.profile() as theirs:
        train(tmp_path / "run", at(-1, lambda session: session.enable_debugging("autograd_profiler")), steps=4)
    assert any(event.key == "aten::addmm" for event in theirs.key_averages())
    assert not list(sonde.Run(tmp_path / "run").events("profile"))


# -- status ----------------------------------------------------------------------------------------------


def test_the_status_holds_what_is_on_since_when_and_what_it_cost(tmp_path: Path) -> None:
    found: dict[int, dict[str, Any]] = {}

    def flip(session: sonde.DebugSession, step: int) -> None:
        if step == 4:
            session.enable_debugging(["gradient_norms", "lr_scheduling"])
        if step == 7:
            session.disable_debugging("lr_scheduling")
        found[step] = session.get_debugging_status()

    train(tmp_path / "run", flip)
    assert set(found[0]) == set(SWITCHES)
    assert not any(state["on"] or state["cost_ms"] for state in found[3].values())
    last = found[11]
    assert last["gradient_norms"]["on"]
    assert last["gradient_norms"]["since_step"] in (5, 6)  # a step may have begun: the scheduler was called
    assert last["gradient_norms"]["by"] == "session"
    assert last["gradient_norms"]["cost_ms"] > 0
    assert not last["lr_scheduling"]["on"]
    assert last["lr_scheduling"]["cost_ms"] > 0  # what it has cost is not forgotten
    assert not last["memory_usage"]["on"]


def test_without_a_name_all_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonde.capture.switches.torch_profiler_switch.NUM_STEPS", 50)
    found: list[int] = []

    def flip(session: sonde.DebugSession, step: int) -> None:
        session.enable_debugging() if step == 0 else session.disable_debugging() if step == 3 else None
        found.append(sum(state["on"] for state in session.get_debugging_status().values()))

    train(tmp_path / "run", flip, steps=6)
    assert max(found) == len(SWITCHES) == 13
    assert found[-1] == 0


def test_an_unknown_switch_is_refused_with_the_nearest(tmp_path: Path) -> None:
    session = sonde.DebugSession(DebugConfig(), to=tmp_path / "run")
    with pytest.raises(sonde.SondeError, match="gradient_norm'") as refused:
        session.enable_debugging(["gradient_norm"])
    assert "gradient_norms" in str(refused.value)


def test_switches_may_be_set_before_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    session = sonde.DebugSession(DebugConfig(), to=tmp_path / "run", strict=True).attach(model)
    session.enable_debugging("backward_pass")
    with session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [report["step"] for report in reports(caplog, "backward_pass")] == [0]


# -- from outside ------------------------------------------------------------------------------------------


def test_the_file_in_the_run_flips_switches_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches_module, "FILE_INTERVAL_NS", 0)
    found: dict[int, bool] = {}

    def flip(session: sonde.DebugSession, step: int) -> None:
        if step in (2, 6):
            write_switch_requests(tmp_path / "run", {"gradient_norms": step == 2})
        found[step] = session.get_debugging_status()["gradient_norms"]["on"]

    train(tmp_path / "run", flip)
    assert [found[step] for step in (2, 4, 6, 8)] == [False, True, True, False]
    flips = [(event.data["on"], event.data["by"]) for event in sonde.Run(tmp_path / "run").events("switch")]
    assert flips == [(True, "sonde switch"), (False, "sonde switch")]


def test_the_file_is_read_no_more_than_twice_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(switches_module, "FILE_INTERVAL_NS", 10**15)
    monkeypatch.setattr(switches_module.Switches, "_read_file", lambda self: reads.append(1))
    train(tmp_path / "run", steps=50)
    assert len(reads) == 1


HOSTILE = {
    "no json": b"{", "a list": b"[1]", "an unknown name": b'{"rm -rf": true}', "no truth": b'{"gradient_norms": "yes"}',
    "deep": b'{"gradient_norms": ' + b"[" * 2000 + b"]" * 2000 + b"}", "binary": bytes(range(256)), "long": b" " * 5000 + b"{}",
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_not_ours_is_ignored_with_one_warning(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(switches_module, "FILE_INTERVAL_NS", 0)

    def flip(session: sonde.DebugSession, step: int) -> None:
        if step >= 0:
            (tmp_path / "run" / SWITCHES_FILE).write_bytes(HOSTILE[case])
            assert not any(state["on"] for state in session.get_debugging_status().values())

    train(tmp_path / "run", flip, steps=4)
    assert len([record for record in caplog.records if SWITCHES_FILE in record.getMessage()]) == 1


def test_a_pipe_a_link_or_a_folder_in_the_place_of_the_file_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches_module, "FILE_INTERVAL_NS", 0)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text('{"gradient_norms": true}')

    def flip(session: sonde.DebugSession, step: int) -> None:
        if step == 0:
            os.mkfifo(tmp_path / "run" / SWITCHES_FILE)
        if step == 3:
            (tmp_path / "run" / SWITCHES_FILE).unlink()
            (tmp_path / "run" / SWITCHES_FILE).symlink_to(elsewhere)
        if step == 4:
            (tmp_path / "run" / SWITCHES_FILE).unlink()
            (tmp_path / "run" / SWITCHES_FILE).mkdir()

    train(tmp_path / "run", flip, steps=7)
    assert not list(sonde.Run(tmp_path / "run").events("switch"))


# -- the training ------------------------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(hooks) for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    ]  # fmt: skip


def test_a_thousand_flips_change_nothing_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonde.capture.switches.torch_profiler_switch.NUM_STEPS", 2)
    plain, plain_model, _ = train(None, steps=240)
    quick = [name for name in SWITCHES if not name.endswith("profiler")]

    def flip(session: sonde.DebugSession, step: int) -> None:
        """Five of them each time; a profile takes its time and is rarer."""
        status = session.get_debugging_status()
        names = [quick[(step + 2 * place) % len(quick)] for place in range(5)]
        for name in [*names, *(["autograd_profiler", "tensorboard_profiler"] if step % 40 == 7 else [])]:
            (session.disable_debugging if status[name]["on"] else session.enable_debugging)([name])

    backward, levels = torch.autograd.backward, {name: logging.getLogger(f"sonde.{name}").level for name in SWITCHES}
    flipped, model, _ = train(tmp_path / "run", flip, steps=240)
    assert len(list(sonde.Run(tmp_path / "run").events("switch"))) > 1000
    assert flipped == plain
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain_model.state_dict().values()))
    assert hooks_of(model) == hooks_of(plain_model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert torch.autograd.backward is backward
    assert not subscribers()
    assert not torch.is_anomaly_enabled()
    assert not torch._C._autograd._profiler_enabled()
    assert {name: logging.getLogger(f"sonde.{name}").level for name in SWITCHES} == levels
    assert not list(sonde.Run(tmp_path / "run").events("retired"))


def test_all_off_nothing_is_reported_and_torch_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sonde.capture.switches.debug_switches.Switches._isolate", lambda self, name, work: asked.append(name))
    monkeypatch.setattr("sonde.capture.switches.rate_limited_log.SwitchLog.write", lambda *args: asked.append("line"))
    train(tmp_path / "run")
    assert not asked
    assert not list(sonde.Run(tmp_path / "run").events("switch"))


def test_a_switch_that_fails_is_turned_off_and_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, step: int) -> None:
        raise ZeroDivisionError("in a report")

    monkeypatch.setattr("sonde.capture.switches.switch_log_output.SwitchOutput._backward_pass", fail)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run") as session:
        session.enable_debugging(["backward_pass", "lr_scheduling"])
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        status = session.get_debugging_status()
    assert not status["backward_pass"]["on"]
    assert status["lr_scheduling"]["on"]
    assert len(sonde.Run(tmp_path / "run").scalar("loss")[0]) == 5
