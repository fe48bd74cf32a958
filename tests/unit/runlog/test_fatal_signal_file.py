"""The file that names the signal a process died of: written by a process that really dies, read whatever is in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sonde.events import FatalSignalReceived
from sonde.report import diagnose
from sonde.runlog.fatal_signal_file import MAX_DUMP, FatalSignal, StackFrame, dump_path, read_fatal_signal
from sonde.runlog.is_writer_running import process_identity
from sonde.runlog.run_reader import Run

# Writes three steps of a run, then does what {body} says.
PROCESS = """
import faulthandler, os, pathlib, resource, signal, sys, threading
import numpy as np
from sonde.events import Site
from sonde.runlog.run_directory import write_run_json
from sonde.runlog.fatal_signal_file import fatal_signals_recorded
from sonde.runlog.writer import Writer
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
run = pathlib.Path(sys.argv[1])
run.mkdir(exist_ok=True)
write_run_json(run, {{"name": "run"}})
writer = Writer(run)
writer.sites([Site(0, "scalar", "loss")])
plan = writer.plan("step", ("value",), [0])
for number in range({num_steps}):
    writer.frame(plan, number, np.array([[1.0]]))
    writer.flush()
def die(name):
    os.kill(os.getpid(), getattr(signal, name))
with fatal_signals_recorded(run):
    {body}
writer.event("end", 3, {{"how": "finished", "exit_code": 0, "exception": ""}})
writer.close()
"""
DUMP = """Fatal Python error: Illegal instruction

Thread 0x00007f1a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f1b (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125 in forward
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751 in _call_impl
  File "/opt/sonde/capture/torch_patches.py", line 80 in wrapped
  File "/data/me/model.py", line 12 in forward
  File "/data/me/train.py", line 41 in <module>
  File "/opt/sonde/script_runner.py", line 110 in run_file

Extension modules: torch._C (total: 1)
"""


@pytest.fixture
def process(tmp_path):
    """`process(body)` runs it in a process of its own that records fatal signals into tmp_path/run."""

    def start(body: str, *, num_steps: int = 3, **variables: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(PROCESS.format(body=body.replace("\n", "\n    "), num_steps=num_steps))
        env = {key: value for key, value in os.environ.items() if key != "PYTHONFAULTHANDLER"} | variables
        return subprocess.run([sys.executable, program, tmp_path / "run"], env=env, capture_output=True, text=True, check=False)

    return start


def dumps(tmp_path):
    return sorted(path.name for path in (tmp_path / "run").glob("fatal-signal*"))


@pytest.fixture
def read(tmp_path):
    def parse(content: str | bytes) -> FatalSignal | None:
        path = tmp_path / "dump"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_fatal_signal(path)

    return parse


@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT"])
def test_a_fatal_signal_is_named_with_the_line_and_still_kills_the_process(name, process, tmp_path):
    done = process(f"die({name!r})")
    assert done.returncode == -getattr(signal, name)
    assert done.stderr == ""  # nothing that the script alone would not have printed
    run = Run(tmp_path / "run")
    assert (run.ended.how, run.ended.last_step) == ("killed", 2)
    assert run.ended.signal.startswith(f"{name} (")
    event = run.processes[0].fatal_signal
    assert (event.kind, event.step, event.data["signal"], event.data["function"]) == ("fatal_signal", 3, name, "die")
    assert event.data["source"].startswith("program.py:")


def test_the_report_finds_it_and_exits_with_1(process, tmp_path):
    process("die('SIGILL')")
    report = diagnose(tmp_path / "run")
    assert (report.verdict, report.exit_code) == ("problems", 1)
    assert report.findings[0].rule == "fatal-signal"
    assert "3 steps, killed by SIGILL (illegal instruction)" in report.summary()
    assert '"signal": "SIGILL (illegal instruction)"' in report.to_json()


def test_a_process_that_dies_before_its_first_step_is_found_too(process, tmp_path):
    process("die('SIGILL')", num_steps=0)
    (finding,) = diagnose(tmp_path / "run").findings
    assert (finding.rule, finding.step) == ("fatal-signal", 0)


def test_sigkill_leaves_nothing_to_tell(process, tmp_path):
    process("die('SIGKILL')")
    run = Run(tmp_path / "run")
    assert (run.ended.how, run.ended.signal) == ("killed", "")
    assert "fatal-signal" in diagnose(run).clear


@pytest.mark.parametrize("body", ["pass", "try: raise ValueError\nexcept ValueError: pass"], ids=["ends", "raises"])
def test_nothing_is_left_behind_by_a_process_that_lives(body, process, tmp_path):
    done = process(body + "\nassert faulthandler.is_enabled()")
    assert done.returncode == 0, done.stderr
    assert dumps(tmp_path) == []
    assert Run(tmp_path / "run").ended.how == "finished"


def test_faulthandler_is_left_as_it_was_found(process, tmp_path):
    after = "\nimport atexit; atexit.register(lambda: print('enabled', faulthandler.is_enabled()))"
    assert process("pass" + after).stdout == "enabled False\n"
    assert process("faulthandler.enable()" + after).stdout == "enabled True\n"  # by the script: it stays
    assert process("faulthandler.disable()" + after).stdout == "enabled False\n"


@pytest.mark.parametrize("variables", [{"PYTHONFAULTHANDLER": "1"}, {"PYTHONDEVMODE": "1"}], ids=["variable", "dev mode"])
def test_where_the_user_enabled_faulthandler_its_output_goes_where_it_went(variables, process, tmp_path):
    done = process("die('SIGILL')", **variables)
    assert "Fatal Python error: Illegal instruction" in done.stderr
    assert dumps(tmp_path) == []


def test_the_death_of_a_forked_child_is_not_the_death_of_the_training(process, tmp_path):
    done = process("child = os.fork()\nif not child: die('SIGILL')\nassert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGILL")
    assert done.returncode == 0, done.stderr
    assert dumps(tmp_path) == []
    process("child = os.fork()\nif not child: die('SIGILL')\nos.waitpid(child, 0)\ndie('SIGKILL')")
    assert Run(tmp_path / "run").ended.signal == ""


def test_a_signal_in_another_thread_is_named_with_that_thread(process, tmp_path):
    process("other = threading.Thread(target=lambda: signal.raise_signal(signal.SIGILL))\nother.start(); other.join()")
    assert Run(tmp_path / "run").processes[0].fatal_signal.data["function"] == "<lambda>"


def test_each_attempt_has_its_own_file_and_the_newest_counts(process, tmp_path):
    process("die('SIGILL')")
    process("pass")
    assert Run(tmp_path / "run").ended.how == "finished"
    assert "fatal-signal" in diagnose(tmp_path / "run").clear
    process("die('SIGSEGV')", num_steps=0)  # resumed, and dead before its first step
    report = diagnose(tmp_path / "run")
    assert report.run.signal == "SIGSEGV (segmentation fault)"
    assert [finding.rule for finding in report.findings] == ["fatal-signal"]


def test_a_directory_that_is_gone_changes_nothing(process, tmp_path):
    assert process("pass", num_steps=1).returncode == 0
    code = "import pathlib\nfrom sonde.runlog.fatal_signal_file import fatal_signals_recorded\n"
    code += f"with fatal_signals_recorded(pathlib.Path({str(tmp_path / 'gone')!r})): print('ran')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "ran\n"


# ---- reading


def test_the_users_line_is_the_nearest_that_is_in_no_library_and_not_ours(read):
    found = read(DUMP)
    assert found.user == StackFrame("/data/me/model.py", 12, "forward")
    assert found.to_event(7).data == {
        "signal": "SIGILL", "meaning": "illegal instruction", "source": "model.py:12", "function": "forward",
        "inside": "torch/nn/modules/linear.py", "inside_line": 125, "inside_function": "forward",
    }  # fmt: skip
    assert isinstance(found.to_event(7).typed, FatalSignalReceived)
    assert isinstance(FatalSignal("SIGILL", "illegal instruction").to_event(7).typed, FatalSignalReceived)


def test_a_thread_without_python_code_is_told_by_what_the_main_thread_waits_for(read):
    found = read(DUMP.replace("Current thread", "Thread"))
    assert found.user.place == "model.py:12"


@pytest.mark.parametrize("length", range(0, len(DUMP), 7))
def test_a_dump_that_was_cut_short_is_read_as_far_as_it_goes(read, length):
    found = read(DUMP[:length])
    assert found is None or found.signal == "SIGILL"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 5000, bytes(range(256)) * 20, b"Fatal Python error: ", b"Fatal Python error: none_dealloc\n",
        b"Fatal Python error: \xff\xfe\n",
        DUMP.replace("line 12", "line " + "9" * 4000).encode()[:20], b"Fatal Python error: Aborted" * 100_000,
    ],
    ids=["empty", "zeros", "noise", "head", "another error", "bytes", "short", "no line"],
)  # fmt: skip
def test_what_is_no_dump_says_nothing(read, content):
    assert read(content) is None


def test_hostile_rows_are_not_frames(read):
    assert read(DUMP.replace("line 125", "line " + "9" * 400)) == FatalSignal("SIGILL", "illegal instruction")
    assert read(DUMP.replace("/env/lib", "/" * 3_000_000)).user is None  # longer than what is read


def test_at_most_so_much_of_a_file_is_read(tmp_path):
    with (tmp_path / "dump").open("wb") as file:
        file.write(DUMP.encode())
        file.truncate(1 << 40)  # sparse
    assert read_fatal_signal(tmp_path / "dump").signal == "SIGILL"
    assert MAX_DUMP < 1 << 20


def test_pipes_links_and_directories_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "target").write_text(DUMP)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert [read_fatal_signal(tmp_path / name) for name in ("pipe", "link", "", "missing")] == [None] * 4


def test_a_hostile_manifest_names_no_file_elsewhere(tmp_path):
    path = dump_path(tmp_path, {"host": "../../etc", "pid": "/passwd\0", "start_ticks": "x" * 9000})
    assert path.parent == tmp_path
    assert len(path.name) < 200
    assert read_fatal_signal(path) is None
    assert dump_path(tmp_path, {}).parent == tmp_path


def test_a_dump_of_a_process_that_runs_is_not_believed(sample_run):
    run = sample_run("here", [1.0, 0.9], ending=None)
    dump_path(run, process_identity()).write_text(DUMP)
    assert (Run(run).ended.how, Run(run).ended.signal) == ("running", "")
