"""`sonde diagnose --follow` beside a training in another process that grows, finds a defect and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import SHELL

TESTS = Path(__file__).parent.parent
TRAINING = f"""
import sys
sys.path.insert(0, {str(TESTS / "helpers")!r})
from pathlib import Path
from sample_runs import sources, write_sample_run

def losses():
    for line in sys.stdin:
        print("written", flush=True)
        yield float(line)

forgotten = {{"zero_grads": 0, "stale_updates": 1}}
write_sample_run(Path("runs/growing"), losses(), scalars=forgotten, events=sources(), ending={{}})
"""


def start(tmp_path, *command, **rest):
    return subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, env=os.environ | SHELL, stdout=subprocess.PIPE, text=True, encoding="utf-8", **rest
    )


@pytest.fixture
def training(tmp_path):
    with start(tmp_path, "-c", TRAINING, stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def train(child, num_steps):
    child.stdin.write("".join(f"{2.0 * 1.1**step}\n" for step in range(num_steps)))
    child.stdin.flush()
    for _ in range(num_steps):
        assert child.stdout.readline() == "written\n"


def test_findings_are_printed_while_the_run_grows_and_the_verdict_when_it_has_ended(tmp_path, training):
    train(training, 30)
    with start(tmp_path, "-m", "sonde", "diagnose", "--follow") as follower:
        assert follower.stdout.readline().startswith("following runs/growing from step ")
        while "missing-zero-grad" not in (row := follower.stdout.readline()):
            assert row  # the pipe is open: the finding appears before the run ends
        assert training.poll() is None
        train(training, 30)
        training.stdin.close()
        rest = follower.stdout.read()
    assert "the run has ended at step 59: finished" in rest
    assert "✗ problems" in rest
    assert "missing-zero-grad" not in rest.partition("rules ")[0]  # each finding once
    assert follower.returncode == 1


def test_json_is_one_document_per_line(tmp_path, training):
    train(training, 30)
    with start(tmp_path, "-m", "sonde", "diagnose", "--follow", "--json") as follower:
        assert json.loads(follower.stdout.readline())["ended"] == "running"
        training.stdin.close()
        *_, last = map(json.loads, follower.stdout)
    assert (last["ended"], last["verdict"]) == ("finished", "problems")
    assert follower.returncode == 1


def test_ctrl_c_stops_following_quietly_and_leaves_the_training_alone(tmp_path, training):
    train(training, 30)
    with start(tmp_path, "-m", "sonde", "diagnose", "--follow", stderr=subprocess.PIPE) as follower:
        assert follower.stdout.readline().startswith("following")
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate()
    assert (errors, follower.returncode) == ("", 130)
    train(training, 1)


@pytest.mark.parametrize("stream", ["2>&-", ">&-"])
def test_a_closed_stream_does_not_change_the_exit_code(stream, healthy_run):
    command = f"{sys.executable} -m sonde diagnose {healthy_run} --check {stream}"
    assert subprocess.run(["bash", "-c", command], capture_output=True, check=False).returncode == 0
