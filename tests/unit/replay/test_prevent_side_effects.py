"""What a child may not do: nothing that it does reaches the training, its files or the world outside."""

import contextlib
import ctypes
import errno
import io
import logging
import mmap
import multiprocessing
import os
import pty
import queue
import socket
import sqlite3
import subprocess
import sys
import threading

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="isolation is complete on Linux only")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from sonde.replay import prevent_side_effects  # noqa: E402
from sonde.replay.forked_child import ReplayChild, run_in_child  # noqa: E402

LIBC = ctypes.CDLL(None, use_errno=True)


def in_child(act):
    """What `act` returns in a child, or the text of what it raises."""

    def work(preliminary):
        try:
            return {"value": act()}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    answer = run_in_child(work)
    assert not answer.failure
    return answer.data.get("error", answer.data.get("value"))


def number_of_error(call, *args):
    """Calls a function of the C library, which no audit hook sees; the name of the error that it gets."""
    return errno.errorcode[ctypes.get_errno()] if call(*args) == -1 else "it succeeded"


# ---- the world outside


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda path: (path / "file").open("w"), "for writing"),
        (lambda path: (path / "file").open("r+"), "for writing"),
        (lambda path: (path / "new").open("x"), "for writing"),
        (lambda path: (path / "file").open("ab"), "for writing"),
        (lambda path: os.open(path / "file", os.O_RDWR), "for writing"),
        (lambda path: (path / "new").touch(), "for writing"),
        (lambda path: sqlite3.connect(path / "new"), "it opens a database"),
        (lambda path: os.unlink(path / "file"), "it deletes a file"),
        (lambda path: os.rename(path / "file", path / "new"), "it renames a file"),
        (lambda path: os.replace(path / "file", path / "new"), "it renames a file"),
        (lambda path: os.mkdir(path / "new"), "it creates a directory"),
        (lambda path: os.rmdir(path / "folder"), "it deletes a directory"),
        (lambda path: os.symlink(path / "file", path / "new"), "it creates a link"),
        (lambda path: os.link(path / "file", path / "new"), "it creates a link"),
        (lambda path: os.truncate(path / "file", 0), "it truncates a file"),
        (lambda path: os.chmod(path / "file", 0o777), "it changes the rights of a file"),
        (lambda path: os.utime(path / "file", (0, 0)), "PermissionError"),
        (lambda path: os.mkfifo(path / "new"), "PermissionError"),
        (lambda path: os.setxattr(path / "file", "user.name", b"1"), "PermissionError"),
        (lambda path: os.kill(os.getppid(), 0), "it sends a signal"),
        (lambda path: os.fork(), "it forks"),
        (lambda path: os.system(f"touch {path}/new"), "it starts a program"),
        (lambda path: subprocess.run(["touch", path / "new"], check=False), "it starts a program"),
        (lambda path: os.execv("/bin/true", ["true"]), "it starts a program"),
        (lambda path: socket.create_connection(("127.0.0.1", 9)), "it connects to another program"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(str(path / "new")), "it opens a port"),
        (lambda path: socket.socket(type=socket.SOCK_DGRAM).sendto(b"1", ("127.0.0.1", 9)), "it sends to another program"),
        (lambda path: torch.save({}, path / "new"), ""),
        (lambda path: torch.zeros(2).numpy().tofile(path / "new"), "for writing"),
        (lambda path: np.save(path / "new", np.ones(2)), "for writing"),
        (lambda path: torch.jit.script(torch.nn.Linear(1, 1)).save(str(path / "new")), ""),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_cannot_act_on_the_world_outside(act, reason, tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    before = {path: path.lstat() for path in [tmp_path, *tmp_path.iterdir()]}
    outcome = in_child(lambda: str(act(tmp_path)))
    after = {path: path.lstat() for path in [tmp_path, *tmp_path.iterdir()]}
    assert [(path, s.st_mode, s.st_mtime_ns, s.st_ctime_ns, s.st_size) for path, s in before.items()] == [
        (path, s.st_mode, s.st_mtime_ns, s.st_ctime_ns, s.st_size) for path, s in after.items()
    ]
    assert reason in outcome
    assert "Error" in outcome or "CannotReplay" in outcome, outcome


def test_the_filter_of_system_calls_holds_where_no_audit_hook_is_asked(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    name, parent = os.fsencode(file), os.getpid()
    calls = {
        "open": (LIBC.open, name, os.O_WRONLY),
        "creat": (LIBC.creat, name + b"2", 0o600),
        "unlink": (LIBC.unlink, name),
        "rename": (LIBC.rename, name, name + b"2"),
        "mkdir": (LIBC.mkdir, name + b"2", 0o700),
        "mknod": (LIBC.mknod, name + b"2", 0o100600, 0),
        "chown": (LIBC.chown, name, -1, -1),
        "lchown": (LIBC.lchown, name, -1, -1),
        "chmod": (LIBC.chmod, name, 0o777),
        "truncate": (LIBC.truncate, name, 0),
        "setxattr": (LIBC.setxattr, name, b"user.name", b"1", 1, 0),
        "kill": (LIBC.kill, parent, 0),
        "sigqueue": (LIBC.sigqueue, parent, 0, None),
        "fork": (LIBC.fork,),
        "vfork": (LIBC.vfork,),
        "shmget": (LIBC.shmget, 0, 4096, 0o1600),
        "setpriority": (LIBC.setpriority, 0, parent, 0),
        "mq_open": (LIBC.mq_open, b"/sonde-test", os.O_CREAT | os.O_WRONLY, 0o600, None),
        "shm_open": (LIBC.shm_open, b"/sonde-test", os.O_CREAT | os.O_RDWR, 0o600),
    }
    found = in_child(lambda: {what: number_of_error(*call) for what, call in calls.items()})
    assert {what: error for what, error in found.items() if error != "EPERM"} == {}
    assert file.read_text() == "text"


def test_a_child_can_read_files_start_threads_and_make_sockets(tmp_path):
    (tmp_path / "file").write_text("text")

    def act():
        results = []
        thread = threading.Thread(target=lambda: results.append((tmp_path / "file").read_text()))
        thread.start()
        thread.join()
        socket.socket().close()
        return results

    assert in_child(act) == ["text"]


def test_a_child_can_write_to_the_descriptors_that_are_kept(tmp_path):
    with open(tmp_path / "file", "wb", buffering=0) as file:
        child = ReplayChild(lambda preliminary: {"num": file.write(b"text")}, keep=(file.fileno(),))
        assert child.poll(100).data == {"num": 4}
    assert (tmp_path / "file").read_bytes() == b"text"


def test_landlock_alone_forbids_writing_files(tmp_path):
    if LIBC.syscall(prevent_side_effects._CREATE_RULESET, None, 0, 1) < 1:
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "file").write_text("text")
    name = os.fsencode(tmp_path / "file")
    pid = os.fork()
    if pid == 0:
        status = 9
        with contextlib.suppress(BaseException):
            LIBC.prctl(prevent_side_effects._NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            prevent_side_effects._forbid_writing_files(LIBC)
            new = name + b"2"
            calls = [(LIBC.open, name, os.O_WRONLY), (LIBC.unlink, name), (LIBC.creat, new, 0o600), (LIBC.mkdir, new, 0o700)]
            status = sum(number_of_error(*call) == "EACCES" for call in calls)
            status += LIBC.open(name, os.O_RDONLY) >= 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


# ---- memory


def test_what_a_child_writes_to_shared_memory_the_parent_does_not_see(tmp_path):
    shared = torch.zeros(4).share_memory_()
    value, lock, event = multiprocessing.Value("i", 1), multiprocessing.Lock(), multiprocessing.Event()
    mapped = np.memmap(tmp_path / "array", dtype=np.float32, mode="w+", shape=4)
    of_file = torch.from_file(str(tmp_path / "tensor"), shared=True, size=4)
    anonymous = mmap.mmap(-1, 8192)
    anonymous[:4] = b"text"

    def act():
        before = [anonymous[:4].decode(), value.value]
        shared.fill_(1)
        value.value = 7
        event.set()
        lock.acquire()  # and never released
        mapped[:] = 1
        mapped.flush()
        of_file.fill_(1)
        anonymous[:4] = b"TEXT"
        return [*before, shared.sum().item(), value.value, event.is_set(), anonymous[:4].decode()]

    assert in_child(act) == ["text", 1, 4.0, 7, True, "TEXT"]
    assert [shared.sum().item(), value.value, event.is_set(), mapped.sum(), of_file.sum().item()] == [0.0, 1, False, 0.0, 0.0]
    assert lock.acquire(block=False)
    assert anonymous[:4] == b"text"
    assert np.fromfile(tmp_path / "array", dtype=np.float32).tolist() == [0.0] * 4


def test_shared_memory_for_which_there_is_no_room_is_a_reason(monkeypatch):
    shared = torch.zeros(1 << 20).share_memory_()
    monkeypatch.setattr("sonde.capture.process_memory.available", lambda: 1 << 20)
    answer = run_in_child(lambda preliminary: {"sum": shared.sum().item()})
    assert "of shared memory would have to be copied, and 0.0 GB are free" in answer.failure


# ---- open files


def test_pipes_sockets_terminals_and_files_for_writing_lead_nowhere(tmp_path):
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    primary, terminal = pty.openpty()
    os.write(writer, b"1")
    theirs.send(b"2")
    with open(tmp_path / "w", "wb", buffering=0) as new, open(tmp_path / "a", "ab", buffering=0) as log:
        both = os.open(tmp_path / "both", os.O_RDWR | os.O_CREAT)

        def act():
            for number in (writer, terminal, primary, new.fileno(), log.fileno(), both):
                os.write(number, b"child")
            return [os.read(reader, 10).decode(), os.fstat(ours.fileno()).st_rdev == os.stat(os.devnull).st_rdev]

        assert in_child(act) == ["", True]
        os.write(both, b"parent")
    assert os.read(reader, 10) == b"1"
    assert ours.recv(10) == b"2"
    os.set_blocking(primary, False)
    with pytest.raises(BlockingIOError):
        os.read(primary, 10)
    assert [(tmp_path / name).read_bytes() for name in ("w", "a", "both")] == [b"", b"", b"parent"]
    for number in (reader, writer, primary, terminal, both):
        os.close(number)
    ours.close()
    theirs.close()


def test_a_file_that_is_read_has_its_position_in_the_child_and_keeps_it_in_the_parent(tmp_path):
    (tmp_path / "file").write_text("one\ntwo\nthree\n")
    number = os.open(tmp_path / "file", os.O_RDONLY)
    os.read(number, 4)
    assert in_child(lambda: os.read(number, 3).decode()) == "two"
    assert os.read(number, 3) == b"two"
    (tmp_path / "file").unlink()
    assert in_child(lambda: os.read(number, 6).decode()) == "\nthree"
    assert os.read(number, 6) == b"\nthree"
    os.close(number)


def test_what_a_child_prints_and_logs_appears_nowhere(capfd, caplog, tmp_path):
    with open(tmp_path / "log", "w") as log, open(tmp_path / "rows", "w") as rows:
        rows.write("half a row")  # is in the buffer at the fork
        handler = logging.StreamHandler(log)
        logging.getLogger("test").addHandler(handler)

        def act():
            print("child")  # noqa: T201
            print("child", file=sys.stderr)  # noqa: T201
            sys.__stdout__.write("child")
            logging.getLogger("test").error("child")
            handler.stream.write("child")
            handler.flush()
            rows.write("child")
            rows.flush()
            LIBC.puts(b"child")
            LIBC.fflush(None)
            os.write(1, b"child")
            os.write(2, b"child")

        assert in_child(act) is None
        logging.getLogger("test").removeHandler(handler)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert (tmp_path / "log").read_text() == ""
    assert (tmp_path / "rows").read_text() == "half a row"


def test_what_is_in_the_buffer_of_a_printed_line_is_written_once(capfd):
    text = io.TextIOWrapper(io.BufferedWriter(io.FileIO(os.dup(1), "w")))
    text.write("once")
    assert in_child(lambda: text.flush()) is None
    text.close()
    assert capfd.readouterr().out == "once"


def test_a_child_that_would_wait_for_a_thread_that_it_does_not_have_says_so():
    """`queue.get()` and `event.wait()` would otherwise wait until the time limit."""
    answer = run_in_child(lambda preliminary: {"item": queue.Queue().get()}, limit_s=20)
    assert answer.failure == "it waits for another thread, which the copy of the process does not have"

    def own_thread(preliminary):
        done = threading.Event()
        threading.Thread(target=done.set).start()
        return {"came": done.wait(timeout=None)}

    assert run_in_child(own_thread, limit_s=20).data == {"came": True}
