"""A run as a trace: its steps, phases, events and curves, and the command that writes it. No torch."""

import math
from pathlib import Path

import numpy as np
import pytest

import sonde.export
from chrome_traces import events_of, spans
from sonde.cli import main
from sonde.events import STEP_SCALARS, Event, Kind, Site
from sonde.export import EXPORTERS
from sonde.runlog.run_directory import write_run_json
from sonde.runlog.writer import Writer

TIMES = {"data_ms": 1.0, "forward_ms": 3.0, "backward_ms": 4.0, "optimizer_ms": 1.0, "other_ms": 0.9, "sonde_ms": 0.1, "step_ms": 10.0}


def exported(run: Path, capsys, *more: str) -> list[dict]:
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), "--to", "perfetto", *more])
    assert left.value.code == 0
    return events_of(Path(capsys.readouterr().out.strip()))


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["export", *arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_steps_follow_each_other_and_hold_their_phases(sample_run, capsys):
    events = exported(sample_run("base", [1.0, 0.5, 0.25], scalars=TIMES), capsys)
    steps = spans(events, "step")
    assert [step["name"] for step in steps] == ["step 0", "step 1", "step 2"]
    assert [step["ts"] for step in steps] == [0.0, 10_000.0, 20_000.0]
    phases = [(phase["name"], phase["dur"]) for phase in spans(events, "phase")[:6]]
    assert phases == [
        ("data", 1000.0), ("forward", 3000.0), ("backward", 4000.0), ("optimizer", 1000.0), ("other", 900.0), ("sonde", 100.0)
    ]  # fmt: skip


def test_a_time_that_is_none_is_left_out(sample_run, capsys):
    events = exported(sample_run("base", [1.0, 0.5], scalars=TIMES | {"step_ms": 1.7e308, "other_ms": 1e306}), capsys)
    assert [step["ts"] for step in spans(events, "step")] == [0.0, 9100.0]


def test_the_loss_is_a_curve_and_a_bad_one_is_marked(sample_run, capsys):
    events = exported(sample_run("base", [1.0, math.nan, 0.25], scalars=TIMES), capsys)
    curve = [(event["ts"], event["args"]["value"]) for event in events if event["ph"] == "C" and event["name"] == "loss"]
    assert curve == [(0.0, 1.0), (20_000.0, 0.25)]
    assert [event["ts"] for event in events if event["ph"] == "i" and event["name"] == "loss is NaN"] == [10_000.0]
    assert spans(events, "step")[1]["args"]["loss"] == "NaN"


def test_events_stand_at_the_beginning_of_their_step_and_the_end_at_the_end(sample_run, capsys):
    retired = Event("retired", 1, {"probe": "weights", "where": "head\x1b[31m", "error": "boom"})
    events = exported(sample_run("base", [1.0, 0.5], scalars=TIMES, events=[retired]), capsys)
    instants = {event["cat"]: event for event in events if event["ph"] == "i"}
    assert (instants["retired"]["name"], instants["retired"]["ts"]) == ("retired: head\\x1b[31m", 10_000.0)
    assert instants["retired"]["args"]["error"] == "boom"
    assert (instants["end"]["name"], instants["end"]["ts"]) == ("end: finished", 20_000.0)


def test_phases_that_lie_inside_each_other_are_cut_at_the_end_of_their_step(sample_run, capsys):
    closure = TIMES | {"optimizer_ms": 9.0}  # LBFGS: forward and backward happen inside of the optimizer's step
    events = exported(sample_run("base", [1.0], scalars=closure), capsys)
    optimizer = next(phase for phase in spans(events, "phase") if phase["name"] == "optimizer")
    assert optimizer["ts"] + optimizer["dur"] == 10_000.0
    assert optimizer["args"]["ms"] == 9.0


def test_ranks_are_processes_and_what_the_user_logs_is_a_curve(tmp_path, capsys):
    run = tmp_path / "ranks"
    run.mkdir()
    write_run_json(run, {"name": "ranks"})
    for rank in (0, 1):
        writer = Writer(run, rank=rank, world_size=2)
        writer.sites([*(Site(i, "scalar", name) for i, name in enumerate(STEP_SCALARS)), Site(500, "scalar", "accuracy")])
        values = dict.fromkeys(STEP_SCALARS, 0.0) | TIMES
        writer.frame(writer.plan(Kind.STEP, ("value",), range(len(STEP_SCALARS))), 0, np.array([[values[name]] for name in STEP_SCALARS]))
        writer.frame(writer.plan(Kind.LOG, ("value",), [500]), 0, np.array([[0.75]]))
        writer.close()
    events = exported(run, capsys)
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0", "rank 1"]
    logged = [event for event in events if event["ph"] == "C" and event["name"] == "accuracy"]
    assert [event["args"]["value"] for event in logged] == [0.75, 0.75]
    assert len({event["pid"] for event in logged}) == 2


def test_a_long_run_is_drawn_from_its_last_steps_and_says_so(sample_run, capsys, monkeypatch):
    monkeypatch.setattr("sonde.export.perfetto.MAX_STEPS", 10)
    events = exported(sample_run("long", [1.0] * 30, scalars=TIMES), capsys)
    assert [step["name"] for step in spans(events, "step")] == [f"step {number}" for number in range(20, 30)]
    assert spans(events, "step")[0]["ts"] == 200_000.0
    assert any(event["name"] == "the 20 steps before this one are left out" for event in events)


def test_an_unknown_format_is_refused_with_those_that_there_are(sample_run, capsys):
    run = str(sample_run("base", [1.0]))
    letter = refused(capsys, run, "--to", "perfeto")
    assert "Did you mean perfetto?" in letter
    assert ", ".join(EXPORTERS) in letter


def test_a_file_that_is_there_is_kept_unless_forced(sample_run, capsys, tmp_path):
    run = sample_run("base", [1.0], scalars=TIMES)
    (tmp_path / "x.json").write_text("mine")
    assert "exists already" in refused(capsys, str(run), "--to", "perfetto", "-o", str(tmp_path / "x.json"))
    assert (tmp_path / "x.json").read_text() == "mine"
    assert exported(run, capsys, "-o", str(tmp_path / "x.json"), "--force")


def test_a_run_without_a_step_has_nothing_to_draw(sample_run, capsys):
    assert "has no complete step" in refused(capsys, str(sample_run("empty", [])), "--to", "perfetto")


def test_parquet_is_what_compact_writes(sample_run, capsys):
    pytest.importorskip("pyarrow")
    run = sample_run("base", [1.0])
    with pytest.raises(SystemExit):
        main(["export", str(run), "--to", "parquet"])
    assert str(run / "events.parquet") in capsys.readouterr().out.splitlines()
    assert "written beside the log" in refused(capsys, str(run), "--to", "parquet", "-o", "x")


def test_the_tuple_of_exporters_is_the_folder_of_exporters():
    folder = Path(sonde.export.__file__).parent.glob("*.py")
    assert sorted(EXPORTERS) == sorted(path.stem for path in folder if "\ndef export(" in path.read_text(encoding="utf-8"))
