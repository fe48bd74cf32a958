"""Faults while a bad step runs again in a child: the training is that of a bare run, bit for bit, and the run says what is missing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="a step runs again in a forked process")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

import fork_server  # noqa: E402
import sonde  # noqa: E402
from sonde import Run  # noqa: E402
from sonde.config import DebugConfig  # noqa: E402
from sonde.errors import NonFiniteError  # noqa: E402
from sonde.incidents import search_cause_in_child  # noqa: E402
from sonde.replay import forked_child  # noqa: E402
from sonde.replay.forked_child import ReplayChild  # noqa: E402

PARENT = os.getpid()
SPIKE, BAD = 60, 70
GRAPH = "read from the graph of the loss: line and module are not known; "


class Net(nn.Module):
    """In a child, its forward does `in_child` first."""

    in_child = staticmethod(lambda: None)

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        if os.getpid() != PARENT:
            self.in_child()
        return self.head(self.body(x))


def train(path, *, in_child=lambda: None, spikes=(SPIKE,), bad=(BAD,), steps=80, config=None, on_step=lambda step: None):
    """The losses of a regression with odd targets in some steps and a NaN in others, watched into `path` or bare."""
    torch.manual_seed(3)
    model = Net()
    model.in_child = in_child
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []

    def loop():
        for step in range(steps):
            x = torch.randn(8, 4)
            y = x[:, :1] + (1e3 if step in spikes else 0.0) * (torch.arange(8) == 2)[:, None]
            weight = torch.where((torch.arange(8) == 5) & (step in bad), -1.0, 1.0)
            output = model(x)
            loss = (output - y).square().mean() + (output[:, 0] * 0 + weight).log().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            losses.append(loss.item())
            on_step(step)

    if path is None:
        loop()
    else:
        with sonde.watch(model, optimizer, to=path, strict=True, config=config):
            loop()
    return repr(losses), repr([tensor.tolist() for tensor in model.state_dict().values()])


@pytest.fixture(scope="module")
def bare():
    return train(None)


def answers(path):
    """The step and the reason of each answer; an empty one where the search succeeded."""
    found = {}
    for event in Run(path).events():
        if event.kind in ("origin", "origin_unknown", "spike"):
            found[event.kind, event.step] = event.data.get("reason") or "; ".join(event.data.get("caveats") or ())
    return found


def hang():
    while True:
        time.sleep(60)


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setitem(ReplayChild.__init__.__kwdefaults__, "limit_s", 1.0)


def test_without_a_fault_a_spike_and_a_bad_number_are_answered(tmp_path, bare):
    assert train(tmp_path / "run") == bare
    assert answers(tmp_path / "run") == {("spike", SPIKE): "", ("origin", BAD): ""}


def test_a_child_that_dies_costs_its_answer_and_the_graph_is_asked(tmp_path, bare):
    assert train(tmp_path / "run", in_child=lambda: os._exit(9)) == bare
    found = answers(tmp_path / "run")
    assert found["spike", SPIKE] == "the step could not be run again: the process that ran it again ended (exit status 9)"
    assert found["origin", BAD] == GRAPH + "the process that ran it again ended (exit status 9)"
    report = sonde.diagnose(tmp_path / "run")
    assert report.verdict == "problems"
    assert "the process that ran it again ended (exit status 9)" in report.to_json()


def test_a_child_that_is_killed_from_outside_costs_its_answer(tmp_path, bare, monkeypatch):
    monkeypatch.setattr(search_cause_in_child, "WAIT_S", 0.0)
    started = []

    class Recorded(ReplayChild):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self._pid)

    def kill(step):
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        started.clear()

    monkeypatch.setattr(search_cause_in_child, "ReplayChild", Recorded)
    assert train(tmp_path / "run", in_child=hang, on_step=kill) == bare
    found = answers(tmp_path / "run")
    assert {step for _, step in found} == {SPIKE, BAD}
    assert all("killed by SIGKILL" in reason for reason in found.values()), found


def test_a_child_that_hangs_is_ended_and_the_training_goes_on_meanwhile(tmp_path, bare, short_limit):
    began = time.monotonic()
    assert train(tmp_path / "run", in_child=hang, spikes=(SPIKE,)) == bare
    assert time.monotonic() - began < 30
    found = answers(tmp_path / "run")
    assert "it was given up for the origin of the bad number in step 70" in found["spike", SPIKE]
    assert found["origin", BAD] == GRAPH + "running it again took more than 1 s"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("fork", "no process could be started for it (Resource temporarily unavailable)"),
        ("memory", "a second process may need 0.3 GB of memory, and 0.0 GB are free"),
        ("device", "the step runs on a device, which a second process must not use"),
    ],
)
def test_where_there_is_no_child_the_graph_answers_and_the_reason_is_named(what, reason, tmp_path, bare, monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    if what == "fork":
        monkeypatch.setattr(forked_child, "_fork", refuse)
    elif what == "memory":
        monkeypatch.setattr("sonde.capture.process_memory.available", lambda: 1 << 20)
    else:
        monkeypatch.setattr(search_cause_in_child, "on_device", lambda tensor: True)
    assert train(tmp_path / "run") == bare
    found = answers(tmp_path / "run")
    assert found["origin", BAD] == GRAPH + reason
    assert reason in found["spike", SPIKE]
    assert reason in sonde.diagnose(tmp_path / "run").to_json()


def test_one_search_at_a_time_a_bad_number_comes_before_a_spike(tmp_path, monkeypatch, short_limit):
    monkeypatch.setattr(search_cause_in_child, "WAIT_S", 0.0)
    monkeypatch.setitem(ReplayChild.__init__.__kwdefaults__, "limit_s", 3.0)
    steps = {"spikes": (60, 95), "bad": (70, 97), "steps": 100}
    assert train(tmp_path / "run", in_child=hang, **steps) == train(None, **steps)
    found = answers(tmp_path / "run")
    searched = "the origin of the bad number in step 70"
    assert f"it was given up for {searched}" in found["spike", 60]
    assert f"it was not run again: {searched} was still searched" in found["spike", 95]
    assert f"it was not run again: {searched} was still searched" in (found.get(("origin", 97)) or found["origin_unknown", 97])
    assert found["origin", 70] == GRAPH + "running it again took more than 3 s"


def test_while_a_search_goes_on_the_graph_of_the_bad_loss_is_freed(tmp_path, monkeypatch, short_limit):
    monkeypatch.setattr(search_cause_in_child, "WAIT_S", 0.0)
    model = Net()
    model.in_child = hang
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for step in range(4):
            loss = (model(torch.randn(8, 4)) * (float("nan") if step == 2 else 1.0)).sum()
            losses.append(weakref.ref(loss))
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0)
            optimizer.step()
        del loss
        assert [each() is None for each in losses] == [True] * 4


def test_raise_mode_waits_for_the_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(search_cause_in_child, "WAIT_S", 0.0)
    config = DebugConfig(anomaly_detection_mode="raise")
    with pytest.raises(NonFiniteError, match="log"):
        train(tmp_path / "run", in_child=lambda: time.sleep(0.5), spikes=(), bad=(3,), steps=5, config=config)
    assert answers(tmp_path / "run") == {("origin", 3): ""}


def test_a_full_disk_costs_the_answer_and_not_the_training(tmp_path, bare):
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")

    def fill(step):
        if step == SPIKE - 1:
            with open(disk / "ballast", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass

    try:
        assert train(disk / "run", on_step=fill, config=DebugConfig(save_debug_info=True)) == bare
        run = Run(disk / "run")
        assert run.last_step < BAD or run.gaps
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# ---- signals to a training of its own

PROGRAM = """
    import json, os, signal, sys, time
    import torch, sonde
    from torch import nn
    from sonde.incidents import search_cause_in_child

    parent, folder = os.getpid(), sys.argv[1]
    children = []
    start = search_cause_in_child.ReplayChild
    class Recorded(start):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, limit_s=4.0, **kwargs)
            children.append(self._pid)
    search_cause_in_child.ReplayChild = Recorded

    class Net(nn.Linear):
        def forward(self, x):
            while os.getpid() != parent:
                time.sleep(60)
            return super().forward(x)

    model = Net(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sonde.watch(model, optimizer, to=folder + "/run", strict=True)
    for step in range(6):
        loss = (model(torch.ones(8, 4)) * (float("nan") if step == 3 else 1.0)).sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)
        optimizer.step()
    print(json.dumps(children), flush=True)
"""


def test_after_the_training_was_killed_no_child_is_left_when_its_time_is_over(tmp_path):
    program = textwrap.dedent(PROGRAM) + "\nos.kill(parent, signal.SIGKILL)\n"
    done = fork_server.python("-c", program, tmp_path, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (child,) = json.loads(done.stdout)
    for _ in range(100):
        if not os.path.exists(f"/proc/{child}"):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child outlived its limit of 4 s")
    (event,) = Run(tmp_path / "run").events("nonfinite")
    assert event.step == 3


def test_ctrl_c_at_the_end_skips_a_running_search(tmp_path):
    program = textwrap.dedent(PROGRAM) + textwrap.dedent("""
        import threading
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(1.0, os.kill, (parent, signal.SIGINT)).start()
        began = time.monotonic()
        session.stop()
        print(time.monotonic() - began < 3.5)
    """)
    done = fork_server.python("-c", program, tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["True"]), done.stderr
    lines = [line for line in done.stderr.splitlines() if "still searching" in line]
    assert lines == ["sonde: still searching for the origin of the bad number in step 3; Ctrl-C skips it."]
    assert list(answers(tmp_path / "run").values()) == ["it was skipped by Ctrl-C"]
