"""R30–R32: what was written survives the death of the process, however it dies."""

import os
import random
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

from sample_logs import start_training
from sonde.events import STATISTICS, Site
from sonde.runlog.run_reader import Run
from sonde.runlog.writer import Writer

ROUNDS = 200
STEPS_BEFORE_DEATH = 300


def train_until_killed(directory, acknowledgements):
    """Runs in a forked child: one number into the pipe after every step whose flush returned."""
    writer = Writer(directory)
    writer.sites([Site(0, "scalar", "loss"), *(Site(i, "parameter", f"p{i}") for i in range(1, 43))])
    scalars, weights = writer.plan("step", ("value",), [0]), writer.plan("gradient", STATISTICS, range(1, 43))
    rows = np.random.default_rng(0).normal(size=(42, 9))
    number = 0
    while True:
        writer.frame(weights, number, rows)
        writer.frame(scalars, number, np.array([[float(number)]]))
        writer.flush()
        os.write(acknowledgements, struct.pack("<q", number))
        number += 1


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_r30_every_step_whose_write_returned_survives_sigkill_at_any_moment(tmp_path):
    chance = random.Random(30)
    for round_ in range(ROUNDS):
        directory = tmp_path / str(round_)
        directory.mkdir()
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(receiving)
                train_until_killed(directory, sending)
            finally:
                os._exit(1)
        os.close(sending)
        acknowledged = -1
        wanted = chance.randrange(1, STEPS_BEFORE_DEATH)
        try:
            while acknowledged < wanted:
                data = os.read(receiving, 8)
                assert len(data) == 8
                acknowledged = struct.unpack("<q", data)[0]
        finally:
            os.kill(child, signal.SIGKILL)
            rest = b""
            while more := os.read(receiving, 65536):
                rest += more
            os.close(receiving)
            os.waitpid(child, 0)
        acknowledged += len(rest) // 8
        run = Run(directory)
        assert acknowledged <= run.last_step <= acknowledged + 1
        assert [step.number for step in run.steps()] == list(range(run.last_step + 1))
        assert not run.damage
        assert len(run.torn) <= 1
        assert run.ended.how == "killed"


DEATHS = {
    "sigterm": "os.kill(os.getpid(), signal.SIGTERM)",
    "sigkill": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit without cleaning up": "os._exit(7)",
    "abort in native code": "os.abort()",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "out of memory": """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
        bytearray(1 << 40)""",
}


@pytest.mark.parametrize("death", DEATHS)
def test_r31_a_process_that_dies_otherwise_loses_nothing_either(tmp_path, death):
    code = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    code += "training = Training(directory)\nfor number in range(100): training.step(number)\n"
    child = start_training(tmp_path, code + "\n".join(line.strip() for line in DEATHS[death].splitlines()),
                           stderr=subprocess.DEVNULL)  # fmt: skip
    assert child.wait() != 0
    run = Run(tmp_path)
    assert (run.last_step, run.damage, run.torn, run.ended.how) == (99, [], [], "killed")


def test_r31_no_step_is_lost_while_memory_runs_out(tmp_path):
    code = """
        import resource
        training = Training(directory)
        training.step(0)
        hoard = []
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), used + (8 << 20)))
        for size in (1 << 20, 1 << 16, 1 << 12, 1 << 8):
            try:
                while True: hoard.append(bytearray(size))
            except MemoryError:
                pass
            training.step(len(hoard))  # may fail inside, must not raise
        hoard.clear()
        training.step(10**9)
    """
    child = start_training(tmp_path, code, stderr=subprocess.PIPE)
    _, errors = child.communicate()
    assert child.returncode == 0, errors
    run = Run(tmp_path)
    numbers = [step.number for step in run.steps()]
    assert (numbers[0], numbers[-1], run.damage) == (0, 10**9, [])
    # each of the steps in between is there, or counted
    assert len(numbers) + sum(gap.num_dropped for gap in run.gaps) >= 6


def test_r32_nothing_calls_fsync_so_the_promise_is_process_death_and_not_host_death(tmp_path):
    code = """
        def forbidden(*_): os._exit(3)
        os.fsync = os.fdatasync = os.sync = forbidden
        training = Training(directory)
        for number in range(50): training.step(number)
        training.writer.close()
    """
    assert start_training(tmp_path, code).wait() == 0
    assert Run(tmp_path).last_step == 49


@pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux")
def test_r32_the_operating_system_sees_no_fsync(tmp_path):
    trace = tmp_path / "trace"
    try:
        subprocess.run(["strace", "-o", trace, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"strace cannot be used here: {error}")
    directory = tmp_path / "run"
    directory.mkdir()
    child = start_training(directory, "training = Training(directory)\ntraining.step(0)\nos.getppid()\ntraining.step(1)")
    assert child.wait() == 0
    program = child.args
    watched = ["strace", "-f", "-e", "trace=fsync,fdatasync,sync,syncfs,msync,write", "-o", str(trace), *program]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(watched, env=environment, check=False).returncode == 0
    calls = trace.read_text(errors="replace")
    assert "write(" in calls
    assert "sync(" not in calls
