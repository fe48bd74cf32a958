"""The reader: everything that was written, in an order that no clock decides."""

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from sonde.errors import NoRunError, SondeError
from sonde.events import STATISTICS, Event, Site
from sonde.report import diagnose
from sonde.runlog import log_file_reader as segments
from sonde.runlog import record_format as f
from sonde.runlog.run_reader import Run
from sonde.runlog.writer import Writer


def write_steps(directory, numbers, *, rank=0, end=None, offset=0.0, **rest):
    writer = Writer(directory, rank=rank, world_size=2, **rest)
    writer.sites([Site(0, "scalar", "loss"), Site(5, "parameter", "fc.weight"), Site(6, "parameter", "fc.bias")])
    scalars = writer.plan("step", ("value",), [0])
    gradients = writer.plan("gradient", STATISTICS, [5, 6])
    for number in numbers:
        writer.frame(gradients, number, np.arange(18.0).reshape(2, 9) + number + offset)
        writer.frame(scalars, number, np.array([[number + offset]]))
        writer.flush()
    if end:
        writer.event("end", numbers[-1], end)
    writer.close()
    return writer.path


def test_a_step_has_all_that_was_written_for_it(tmp_path):
    writer = Writer(tmp_path)
    writer.sites([Site(0, "scalar", "loss"), Site(1, "scalar", "lr"), Site(5, "output", "fc")])
    writer.event("start", 0, {"argv": []})
    writer.frame(writer.plan("activation", STATISTICS, [5]), 0, np.arange(9.0)[None])
    writer.frame(writer.plan("step", ("value",), [0, 1, 99]), 0, np.array([[0.5], [0.1], [7.0]]))
    writer.event("log", 1, {"text": "later"})
    writer.flush()
    (step,) = Run(tmp_path).steps()
    assert (step.number, step.rank, step.scalars) == (0, 0, {"loss": 0.5, "lr": 0.1})
    assert step.events == (Event("start", 0, {"argv": []}),)
    assert step.table("activation") == [(Site(5, "output", "fc"), dict(zip(STATISTICS, map(float, range(9)))))]


def test_a_step_without_its_step_frame_is_not_complete_and_its_events_come_with_the_next(tmp_path):
    writer = Writer(tmp_path)
    writer.sites([Site(0, "scalar", "loss")])
    plan, other = writer.plan("step", ("value",), [0]), writer.plan("gradient", ("l2",), [0])
    writer.frame(plan, 0, np.array([[1.0]]))
    writer.frame(other, 1, np.array([[1.0]]))
    writer.event("nonfinite", 1, {"what": "loss"})
    writer.frame(other, 2, np.array([[2.0]]))
    writer.frame(plan, 2, np.array([[3.0]]))
    writer.frame(other, 3, np.array([[2.0]]))
    writer.flush()
    first, last = Run(tmp_path).steps()
    assert (first.number, last.number) == (0, 2)
    assert last.frames["gradient"].values.tolist() == [[2.0]]
    assert [event.kind for event in last.events] == ["nonfinite"]


def test_one_number_over_time(tmp_path):
    write_steps(tmp_path, range(100), segment_bytes=3000)
    run = Run(tmp_path)
    steps, values = run.series("gradient", "fc.bias", "l2")
    assert steps.tolist() == list(range(100))
    assert values.tolist() == [9.0 + 5 + number for number in range(100)]
    steps, values = run.scalar("loss")
    assert values.tolist() == list(range(100))
    assert values.dtype == np.float64


@pytest.mark.parametrize("question", [("update", "fc.bias", "l2"), ("log", "loss", "value"), ("activation", "fc", "l2")])
def test_a_number_that_was_not_measured_is_an_empty_series(tmp_path, question):
    write_steps(tmp_path, range(3))
    steps, values = Run(tmp_path).series(*question)
    assert (len(steps), len(values)) == (0, 0)


def test_a_scalar_that_was_not_measured_is_an_empty_series(tmp_path):
    write_steps(tmp_path, range(3))
    assert [len(Run(tmp_path).scalar(name)[0]) for name in ("lr", "rss_mb")] == [0, 0]


@pytest.mark.parametrize(
    ("question", "nearest"),
    [
        (("gradients", "fc.bias", "l2"), "Nearest: gradient"),
        (("gradient", "fc.wieght", "l2"), "no parameter 'fc.wieght'. Nearest: fc.weight"),
        (("gradient", "fc", "l2"), "Nearest: fc.weight, fc.bias"),
        (("update", "fc.bias", "norm"), "There are: num, mean"),
        (("gradient", "fc.bias", "mea"), "Nearest: mean"),
        (("gradient", "fc.bias", "l2", 3), "no rank 3; it has 0"),
    ],
)
def test_a_name_that_the_run_does_not_know_is_an_error_with_the_nearest_ones(tmp_path, question, nearest):
    write_steps(tmp_path, range(3))
    with pytest.raises(SondeError, match=nearest):
        Run(tmp_path).series(*question)


def test_a_misspelled_scalar_is_an_error_with_the_nearest_ones(tmp_path):
    write_steps(tmp_path, range(3))
    with pytest.raises(SondeError, match=r"no scalar 'los'\. Nearest: loss"):
        Run(tmp_path).scalar("los")
    with pytest.raises(SondeError, match="There are: loss, grad_norm"):
        Run(tmp_path).scalar("xyzzy")


def test_a_kind_or_a_rank_that_the_run_does_not_know_is_an_error_before_anything_is_read(tmp_path):
    write_steps(tmp_path, range(3))
    run = Run(tmp_path)
    with pytest.raises(SondeError, match=r"'gradients' is no kind of measurement\. Nearest: gradient"):
        run.frames("gradients")
    with pytest.raises(SondeError, match=r"'nonfinit' is no kind of event\. Nearest: nonfinite"):
        run.events("nonfinit")
    for read in (run.steps, lambda rank: run.frames("gradient", rank), lambda rank: run.events("start", rank)):
        with pytest.raises(SondeError, match="no rank 9; it has 0"):
            read(rank=9)
    assert list(run.frames("update")) == list(run.events("spike")) == []  # known, and not in this run
    assert len(list(run.steps(rank=0))) == 3


def test_the_logged_names_of_a_run_with_two_attempts_are_those_of_the_log(tmp_path):
    for names in (["loss", "accuracy"], ["accuracy", "loss"]):  # the same ids, other names
        writer = Writer(tmp_path)
        writer.sites([Site(i, "scalar", name) for i, name in enumerate(names)])
        writer.frame(writer.plan("log", ("value",), [names.index("accuracy")]), 0, np.ones((1, 1)))
        writer.close()
    assert Run(tmp_path).logged == ["accuracy"]


def test_a_run_is_read_from_a_path_and_nothing_else():
    with pytest.raises(NoRunError, match=r"not from NoneType. A session has no run before its start\(\)"):
        Run(None)
    with pytest.raises(NoRunError, match=r'Pass the directory of the run, as in sonde.Run\("runs/base"\)'):
        diagnose(3)


def test_models_calls_and_items_are_told_apart(tmp_path):
    writer = Writer(tmp_path)
    keys = [("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("b", 0, 0)]
    writer.sites([Site(i, "output", "fc", model=model, call=call, item=item) for i, (model, call, item) in enumerate(keys)])
    writer.frame(writer.plan("activation", ("mean",), range(4)), 7, np.arange(4.0)[:, None])
    writer.flush()
    run = Run(tmp_path)
    for i, (model, call, item) in enumerate(keys):
        assert run.series("activation", "fc", "mean", model=model, call=call, item=item)[1].tolist() == [i]


def test_ranks_are_merged_by_step_and_never_by_clock(tmp_path):
    write_steps(tmp_path, range(10), rank=1, offset=0.5)
    write_steps(tmp_path, range(8), rank=0)
    run = Run(tmp_path)
    assert run.ranks == [0, 1]
    assert [(step.number, step.rank) for step in run.steps()] == sorted(
        [(n, 0) for n in range(8)] + [(n, 1) for n in range(10)]
    )
    assert [step.number for step in run.steps(rank=1)] == list(range(10))
    assert run.last_step == 9
    assert run.scalar("loss", rank=1)[1][0] == 0.5
    assert run.scalar("loss")[1][0] == 0.0
    assert [process.last_step for process in run.processes] == [7, 9]


def test_a_resumed_run_keeps_both_attempts(tmp_path):
    write_steps(tmp_path, range(50))
    write_steps(tmp_path, range(40, 60), offset=1000.0)
    run = Run(tmp_path)
    assert [step.number for step in run.steps()] == [*range(50), *range(40, 60)]
    steps, values = run.scalar("loss")
    assert values[steps == 45].tolist() == [45.0, 1045.0]


def test_a_growing_run_is_followed(tmp_path):
    writer = Writer(tmp_path, segment_bytes=1500)
    writer.sites([Site(0, "scalar", "loss")])
    plan = writer.plan("step", ("value",), [0])
    run = Run(tmp_path)
    assert (run.last_step, list(run.steps())) == (-1, [])
    for number in range(100):
        writer.frame(plan, number, np.array([[0.0]]))
        writer.flush()
        assert run.refresh() == 1
        assert run.last_step == number
    assert run.refresh() == 0
    assert [step.number for step in run.steps()] == list(range(100))
    assert len(list(tmp_path.glob("*.sonde"))) > 1


def test_a_record_that_arrives_in_pieces_is_waited_for(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = write_steps(tmp_path / "whole", range(5)).read_bytes()
    (tmp_path / "live").mkdir()
    live = tmp_path / "live" / "rank0-h-1-1-000.sonde"
    live.write_bytes(b"")
    run = Run(tmp_path / "live")
    seen = 0
    for end in range(0, len(whole) + 1, 7):
        live.write_bytes(whole[:end])
        run.refresh()
        assert run.last_step >= seen - 1
        seen = run.last_step + 1
        assert not run.damage
    live.write_bytes(whole)
    run.refresh()
    assert (run.last_step, run.torn) == (4, [])


def test_records_larger_than_a_window_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "WINDOW", 100)
    write_steps(tmp_path, range(20))
    run = Run(tmp_path)
    assert ([step.number for step in run.steps()], run.damage) == (list(range(20)), [])


def test_frames_beyond_the_remembered_layouts_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "MAX_LAYOUT_BYTES", 0)
    write_steps(tmp_path, range(20))
    run = Run(tmp_path)
    assert run.series("gradient", "fc.bias", "l2")[1].tolist() == [14.0 + number for number in range(20)]
    assert len(list(run.frames("gradient"))) == 20
    assert len(list(run.steps())) == 20


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"how": "finished", "exit_code": 0, "exception": None}, ("finished", 0, None)),
        ({"how": "exception", "exit_code": 1, "exception": "ValueError: x"}, ("exception", 1, "ValueError: x")),
        ({"how": "exit", "exit_code": 3}, ("exit", 3, None)),
    ],
)
def test_the_end_is_what_the_training_said(tmp_path, end, expected):
    write_steps(tmp_path, range(4), end=end)
    ended = Run(tmp_path).ended
    assert (ended.how, ended.exit_code, ended.exception, ended.last_step) == (*expected, 3)


def test_a_run_whose_process_lives_is_running_and_one_whose_process_is_gone_was_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from sonde.runlog.writer import Writer\n"
        "Writer(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"open\n"
        assert Run(tmp_path).ended.how == "running"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
        assert Run(tmp_path).ended.how == "killed"
    assert Run(tmp_path).ended.how == "killed"


def test_several_processes_end_as_the_gravest_of_them(tmp_path):
    write_steps(tmp_path, range(3), rank=0, end={"how": "finished", "exit_code": 0})
    write_steps(tmp_path, range(3), rank=1, end={"how": "exception", "exit_code": 1, "exception": "boom"})
    assert Run(tmp_path).ended.how == "exception"
    write_steps(tmp_path, range(3), rank=1, end={"how": "finished", "exit_code": 0})
    assert Run(tmp_path).ended.how == "finished"


def test_steps_are_streamed_and_not_held(tmp_path):
    scalars = f.FramePlan("step", ("value",), [0], exact=True)
    with open(tmp_path / "rank0-h-1-1-000.sonde", "wb") as file:
        file.write(f.header() + f.manifest_record({"rank": 0}) + f.sites_records([Site(0, "scalar", "loss")])[0])
        for number in range(20_000):
            file.write(scalars.encode(number, 0, np.array([[float(number)]])))
    run = Run(tmp_path)
    tracemalloc.start()
    try:
        assert sum(1 for _ in run.steps()) == 20_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20  # held in memory they would take 20 MB
    assert run.scalar("loss")[1].sum() == sum(range(20_000))


def test_a_directory_that_is_no_run_is_explained(tmp_path):
    with pytest.raises(NoRunError, match=r'No run in .*: expected run.json. Did the script run under "sonde run"'):
        Run(tmp_path)
    with pytest.raises(NoRunError, match="the path does not exist"):
        Run(tmp_path / "missing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NoRunError, match="is not a run"):
        Run(tmp_path / "notes.txt")


def test_a_run_that_has_only_begun_has_no_steps(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "x"}')
    run = Run(tmp_path)
    assert (run.info, run.last_step, list(run.steps()), run.ranks) == ({"name": "x"}, -1, [], [])
    assert run.ended.how == "unknown"


def test_a_run_of_a_later_format_is_explained(tmp_path):
    path = write_steps(tmp_path, range(2))
    path.write_bytes(f.header(3) + path.read_bytes()[f.HEADER_BYTES :])
    with pytest.raises(SondeError, match=r"is a run of format 3; this version reads up to 1\. Upgrade with: pip install"):
        Run(tmp_path)


def test_a_single_file_and_a_link_to_it_can_be_opened(tmp_path):
    path = write_steps(tmp_path, range(2))
    assert Run(path).last_step == 1
    os.symlink(path, tmp_path / "latest")
    assert Run(tmp_path / "latest").last_step == 1


def test_a_file_that_shrinks_under_the_reader_is_read_anew(tmp_path):
    path = write_steps(tmp_path, range(20))
    whole = path.read_bytes()
    run = Run(tmp_path)
    path.write_bytes(whole[: len(whole) // 2])
    assert all(step.number < 20 for step in run.steps())
    assert run.damage
    run.refresh()
    assert run.last_step == Run(tmp_path).last_step < 19
    assert not run.damage


def test_what_a_forged_manifest_says_is_not_believed(tmp_path):
    (tmp_path / "rank3-h-1-1-000.sonde").write_bytes(
        f.header() + f.manifest_record({"rank": "x", "attempt": [], "host": 3, "pid": "no"}) + f.record(f.MANIFEST, b"[1]")
    )
    run = Run(tmp_path)
    assert (run.ranks, run.ended.how, len(run.damage)) == ([3], "unknown", 1)
