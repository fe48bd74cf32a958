"""A function runs in a forked copy of the process: its answer comes back, whatever becomes of the child, and the parent is as before."""

import contextlib
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs fork")]

import torch  # noqa: E402

from sonde.errors import CannotReplay  # noqa: E402
from sonde.replay import forked_child  # noqa: E402
from sonde.replay.forked_child import ChildAnswer, ReplayChild, check_memory, run_in_child  # noqa: E402

ENOUGH_S = 100.0  # many times what a child needs; only a test that fails waits for so long


def wait_for_ever(preliminary=None):
    while True:
        time.sleep(60)


def children():
    """Processes that this one has started: zombies too."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No test leaves a child or an open descriptor."""
    before, opened = children(), os.listdir("/proc/self/fd")
    yield
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == len(opened)


# ---- answers


def test_the_answer_comes_back_with_the_numbers_that_the_parent_had():
    numbers, parent = torch.arange(4.0), os.getpid()

    def work(preliminary):
        numbers.mul_(2)
        return {"numbers": numbers.tolist(), "is_child": os.getpid() != parent, "text": "ü\n", "nan": float("nan")}

    answer = run_in_child(work)
    assert answer.failure == ""
    assert answer.data["numbers"] == [0.0, 2.0, 4.0, 6.0]
    assert answer.data["is_child"]
    assert answer.data["text"] == "ü\n"
    assert answer.data["nan"] != answer.data["nan"]
    assert numbers.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_answer_of_several_megabytes_is_complete():
    text = "0123456789" * 600_000
    assert run_in_child(lambda preliminary: {"text": text}) == ChildAnswer({"text": text})


def test_an_answer_above_the_limit_is_refused_and_the_preliminary_one_holds(monkeypatch):
    monkeypatch.setattr(forked_child, "MAX_ANSWER", 1000)

    def work(preliminary):
        preliminary({"first": 1})
        return {"text": "x" * 2000}

    assert run_in_child(work) == ChildAnswer({"first": 1}, "the process that ran it again gave an answer that cannot be read")


def test_the_last_answer_replaces_preliminary_ones():
    def work(preliminary):
        preliminary({"number": 1})
        preliminary({"number": 2})
        return {"number": 3}

    assert run_in_child(work) == ChildAnswer({"number": 3})


def test_backward_runs_in_the_child():
    weight = torch.ones(300, 300, requires_grad=True)

    def work(preliminary):
        (weight @ weight).sum().backward()
        return {"sum": weight.grad.sum().item()}

    assert run_in_child(work).data == {"sum": 2 * 300.0**3}
    assert weight.grad is None


def test_a_poll_before_the_answer_returns_at_once():
    reader, writer = os.pipe()
    child = ReplayChild(wait_for_ever, keep=(writer,))
    assert child.poll() is None
    assert child.poll(0.05) is None
    child.kill()
    os.close(reader)
    os.close(writer)


# ---- failures


def raises(error):
    def work(preliminary):
        preliminary({"first": 1})
        raise error

    return work


def exits(preliminary):
    preliminary({"first": 1})
    os._exit(7)


def reads_address_0(preliminary):
    import ctypes

    preliminary({"first": 1})
    ctypes.string_at(0)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (raises(CannotReplay("it opens a port")), "it opens a port"),
        (raises(ValueError("bad")), "running it again failed (ValueError: bad)"),
        (raises(SystemExit(3)), "running it again failed (SystemExit: 3)"),
        (raises(KeyboardInterrupt()), "running it again failed (KeyboardInterrupt)"),
        (raises(Unprintable()), "running it again failed (Unprintable)"),
        (exits, "the process that ran it again ended (exit status 7)"),
        (reads_address_0, "the process that ran it again ended (killed by SIGSEGV)"),
    ],
    ids=["cannot replay", "exception", "exit", "interrupt", "unprintable exception", "_exit", "crash"],
)
def test_a_failure_has_its_reason_and_the_preliminary_answer(work, reason):
    assert run_in_child(work) == ChildAnswer({"first": 1}, reason)


def test_an_answer_that_is_no_json_is_a_failure():
    assert "TypeError" in run_in_child(lambda preliminary: {"a": {1, 2}}).failure


def test_a_child_that_is_killed_from_outside_is_a_failure():
    child = ReplayChild(wait_for_ever)
    os.kill(child._pid, signal.SIGKILL)
    assert child.poll(ENOUGH_S) == ChildAnswer(None, "the process that ran it again ended (killed by SIGKILL)")


def test_an_answer_is_cut_off_by_death_and_the_preliminary_one_holds():
    def work(preliminary):
        preliminary({"first": 1})
        writer = max(int(each) for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}"))
        os.write(writer, (1000).to_bytes(8, "little") + b'{"data": ')
        os._exit(0)

    assert run_in_child(work) == ChildAnswer({"first": 1}, "the process that ran it again ended (exit status 0)")


def test_a_child_that_takes_too_long_is_ended_and_the_preliminary_answer_holds():
    def work(preliminary):
        preliminary({"first": 1})
        wait_for_ever()

    assert run_in_child(work, limit_s=0.4) == ChildAnswer({"first": 1}, "running it again took more than 0.4 s")


def test_the_kernel_ends_a_child_that_its_parent_does_not_end():
    child = ReplayChild(wait_for_ever, limit_s=1)
    child._deadline += ENOUGH_S
    assert child.poll(ENOUGH_S) == ChildAnswer(None, "running it again took more than 1 s")


def test_a_killed_child_is_gone():
    child = ReplayChild(wait_for_ever)
    pid = child._pid
    child.kill()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_refused_fork_names_the_reason_and_leaves_nothing_open(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(forked_child, "_fork", refuse)
    assert run_in_child(wait_for_ever).failure == "no process could be started for it (Resource temporarily unavailable)"


def test_too_little_memory_for_a_second_copy_names_both_numbers(monkeypatch):
    monkeypatch.setattr("sonde.capture.process_memory.available", lambda: 1 << 30)
    check_memory(512 << 20)
    with pytest.raises(CannotReplay, match=r"may need 1\.2 GB of memory, and 1\.0 GB are free"):
        check_memory(1 << 30)


# ---- the process around it


def test_a_child_that_somebody_else_has_reaped_is_no_error():
    child = ReplayChild(lambda preliminary: {"number": 1})
    os.waitpid(child._pid, 0)
    assert child.poll(ENOUGH_S) == ChildAnswer({"number": 1})
    child = ReplayChild(exits)
    os.waitpid(child._pid, 0)
    assert child.poll(ENOUGH_S) == ChildAnswer({"first": 1}, "the process that ran it again ended (its exit status is unknown)")
    child = ReplayChild(exits)
    os.waitpid(child._pid, 0)
    child.kill()


def test_children_are_answered_where_sigchld_is_ignored():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_in_child(lambda preliminary: {"number": 1}) == ChildAnswer({"number": 1})
        assert run_in_child(exits).failure == "the process that ran it again ended (its exit status is unknown)"
        assert run_in_child(wait_for_ever, limit_s=0.2).failure == "running it again took more than 0.2 s"
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("work", [lambda preliminary: {"first": 1}, exits], ids=["answers", "dies"])
def test_another_process_that_holds_a_copy_of_the_pipe_delays_nothing(work, monkeypatch):
    """A thread of the program starts a process at the same time: it inherits both ends."""
    holders = []

    def fork_twice():
        holder = os.fork()
        if holder == 0:
            with contextlib.suppress(BaseException):
                wait_for_ever()
            os._exit(0)
        holders.append(holder)
        return original()

    original = forked_child._fork
    monkeypatch.setattr(forked_child, "_fork", fork_twice)
    answer = run_in_child(work, limit_s=ENOUGH_S)
    for holder in holders:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert answer.data == {"first": 1}
    assert "took more than" not in answer.failure


def test_more_than_1024_open_files_are_no_obstacle():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"no more than {hard} files can be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    opened = []
    try:
        while not opened or opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        assert run_in_child(lambda preliminary: {"number": 1}) == ChildAnswer({"number": 1})
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_can_be_forked_in_a_thread_and_is_then_the_main_thread():
    answers = []
    work = lambda preliminary: {"is_main": threading.current_thread() is threading.main_thread()}  # noqa: E731
    thread = threading.Thread(target=lambda: answers.append(run_in_child(work)))
    thread.start()
    thread.join()
    assert answers == [ChildAnswer({"is_main": True})]


def test_a_lock_that_another_thread_holds_costs_the_child_its_time_and_not_the_parent():
    lock, held, over = threading.Lock(), threading.Event(), threading.Event()
    handler = logging.StreamHandler()

    def hold():
        with lock, handler.lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def locks(preliminary):
        preliminary({"first": 1})
        with lock:
            return {}

    def logs(preliminary):
        logging.disable(logging.NOTSET)
        handler.handle(logging.LogRecord("name", logging.ERROR, "", 0, "not seen", (), None))
        return {"logged": True}

    try:
        assert run_in_child(locks, limit_s=0.3) == ChildAnswer({"first": 1}, "running it again took more than 0.3 s")
        assert run_in_child(logs) == ChildAnswer({"logged": True})
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("num_forks", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_forks_beside_four_training_threads_are_all_answered(num_forks):
    over, counts = threading.Event(), [0] * 4

    def train(place):
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while not over.is_set():
            optimizer.zero_grad()
            model(torch.randn(64, 32)).square().mean().backward()
            optimizer.step()
            _ = [str(number) * 50 for number in range(100)]  # allocates: a fork may find malloc's locks taken
            counts[place] += 1

    weight = torch.ones(50, 50, requires_grad=True)

    def work(preliminary):
        (weight @ weight).sum().backward()
        return {"sum": weight.grad.sum().item()}

    threads = [threading.Thread(target=train, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    try:
        while min(counts) == 0:
            time.sleep(0.001)
        answers = [run_in_child(work, limit_s=10) for _ in range(num_forks)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    failures = [answer.failure for answer in answers if answer.data != {"sum": 250_000.0}]
    assert not failures


def test_a_child_that_hangs_before_it_starts_is_replaced_by_another(monkeypatch):
    """As it does if another thread held a lock of malloc at the fork."""
    pids = []

    def fork():
        pid = original()
        if pid == 0 and len(pids) < 2:
            wait_for_ever()
        pids.append(pid)
        return pid

    original = forked_child._fork
    monkeypatch.setattr(forked_child, "_fork", fork)
    assert run_in_child(lambda preliminary: {"number": 1}) == ChildAnswer({"number": 1})
    assert len(pids) == 3


# ---- the child


def test_the_child_is_set_up_so_that_it_disturbs_nobody():
    def handler(number, frame):
        raise AssertionError("a handler of the parent was called in the child")

    def work(preliminary):
        torch.set_num_threads(4)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "threads": torch.get_num_threads(),
            "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "int": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "blocked": int(status["SigBlk"], 16),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        }

    nice, threads = os.nice(0), torch.get_num_threads()
    before = signal.signal(signal.SIGTERM, handler)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        found = run_in_child(work).data
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert found == {"threads": 1, "term": True, "int": True, "blocked": 0, "core": [0, 0], "nice": nice + 10, "oom": 1000}
    assert (os.nice(0), torch.get_num_threads()) == (nice, threads)


def test_the_generator_of_python_is_in_the_child_as_it_was_in_the_parent():
    """Python itself seeds it anew after a fork."""
    random.seed(3)
    state = random.getstate()
    drawn = run_in_child(lambda preliminary: {"drawn": random.random()}).data["drawn"]
    assert random.getstate() == state
    assert random.random() == drawn


def test_no_handler_of_fork_that_the_user_registered_runs_in_the_training_process():
    pid = os.fork()  # what is registered stays for the life of a process
    if pid == 0:
        status = 2
        try:
            calls = []
            os.register_at_fork(before=lambda: calls.append("before"), after_in_parent=lambda: calls.append("after"))
            status = 0 if run_in_child(lambda preliminary: {"number": 1}).data == {"number": 1} and not calls else 1
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
