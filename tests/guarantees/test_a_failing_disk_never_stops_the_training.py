"""R33, R34: a disk that fills up, fails or goes away costs facts, which are counted, and never the training."""

import errno
import logging
import os
import shutil
import subprocess

import numpy as np
import pytest

from sample_logs import start_training
from sonde.errors import SondeError
from sonde.events import Site
from sonde.runlog import writer as writing
from sonde.runlog.run_reader import Run
from sonde.runlog.writer import Writer


class Training:
    def __init__(self, directory, **rest):
        self.writer = Writer(directory, **rest)
        self.writer.sites([Site(0, "scalar", "loss")])
        self.plan = self.writer.plan("step", ("value",), [0])

    def step(self, number):
        self.writer.frame(self.plan, number, np.array([[float(number)]]))
        self.writer.flush()


FULL_THEN_FREE = """
    import logging
    warnings = []
    class Keep(logging.Handler):
        def emit(self, record): warnings.append(record.getMessage())
    logging.getLogger("sonde").addHandler(Keep())
    logging.getLogger("sonde").propagate = False
    training = Training(directory)
    {limit}
    number = 0
    while training.writer.num_dropped < 20:
        training.step(number)
        number += 1
    {free}
    for number in range(number, number + 10): training.step(number)
    training.writer.close()
    assert len(warnings) == 1, warnings
    print(number, training.writer.num_dropped)
"""


def check_full_then_free(directory, output):
    last, num_dropped = map(int, output.split())
    run = Run(directory)
    numbers = [step.number for step in run.steps()]
    assert (run.last_step, run.damage, run.torn) == (last, [], [])
    assert sum(gap.num_dropped for gap in run.gaps) == num_dropped
    # a small gap record may still fit where a step does not, so there may be several
    lost = {step for gap in run.gaps for step in range(gap.first_step, gap.last_step + 1)}
    assert set(range(last + 1)) - set(numbers) == lost


def test_r33_a_file_size_limit_is_outlived(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))"
    free = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    code = FULL_THEN_FREE.format(limit=limit, free=free)
    child = start_training(tmp_path, code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = child.communicate()
    assert (child.returncode, errors) == (0, b"")
    check_full_then_free(tmp_path, output)


@pytest.fixture
def small_disk(tmp_path):
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mountpoint)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"mount is not to be had: {error}")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield mountpoint
    subprocess.run(["umount", "-l", str(mountpoint)], check=True)


def test_r33_a_full_disk_is_outlived(small_disk):
    (small_disk / "ballast").write_bytes(bytes(20_000))
    (small_disk / "run").mkdir()
    code = FULL_THEN_FREE.format(limit="", free='os.unlink(os.path.join(directory, "..", "ballast"))')
    child = start_training(small_disk / "run", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = child.communicate()
    assert (child.returncode, errors) == (0, b"")
    check_full_then_free(small_disk / "run", output)


def test_r34_a_read_only_disk_is_a_letter_at_opening(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SondeError, match="Read-only file system"):
        Writer(small_disk)


ERRORS = ("EROFS", "EACCES", "ENOENT", "EIO", "ESTALE", "EMFILE", "EDQUOT", "EINTR", "EAGAIN", "ENOSPC", "EBADF", "EPIPE")


@pytest.mark.parametrize("name", ERRORS)
def test_r34_every_error_at_every_call_is_contained_and_counted(tmp_path, monkeypatch, name, caplog):
    """As SQLite tests: the n-th call fails, for n from 1 on until none is left to fail."""
    code = getattr(errno, name)
    failing = 0
    while True:
        failing += 1
        num_calls = 0

        def write(fd, data, failing=failing):
            nonlocal num_calls
            num_calls += 1
            if num_calls == failing:
                raise OSError(code, os.strerror(code))
            return os.write(fd, data)

        directory = tmp_path / str(failing)
        directory.mkdir()
        monkeypatch.setattr(writing, "_write", write)
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING, "sonde"):
                training = Training(directory, segment_bytes=400)
                for number in range(12):
                    training.step(number)
                training.writer.close()
        except SondeError:
            assert failing == 1  # at opening, and only there
            continue
        monkeypatch.setattr(writing, "_write", os.write)
        run = Run(directory)
        numbers = {step.number for step in run.steps()}
        lost = {step for gap in run.gaps for step in range(gap.first_step, gap.last_step + 1)}
        assert run.damage == []
        assert all(step.scalars == {"loss": step.number} for step in run.steps())
        if num_calls < failing:
            assert numbers == set(range(12))
            break
        # the very last flush has nothing after it that could say so; a new segment that failed to open costs nothing
        assert numbers | lost >= set(range(11))
        assert len(caplog.records) <= 1
    assert failing > 12


def test_r34_a_deleted_run_directory_is_noticed_and_does_not_fill_the_disk(tmp_path, caplog):
    directory = tmp_path / "run"
    directory.mkdir()
    training = Training(directory, segment_bytes=2000)
    training.step(0)
    shutil.rmtree(directory)
    with caplog.at_level(logging.WARNING, "sonde"):
        for number in range(1, 3 * writing.UNLINKED_CHECK):
            training.step(number)
    training.writer.close()
    assert len(caplog.records) == 1
    assert "deleted" in caplog.text
    assert training.writer.num_dropped > writing.UNLINKED_CHECK
    assert not directory.exists()


def test_r34_no_free_file_descriptor_stops_neither_training_nor_log(tmp_path):
    code = """
        import resource
        training = Training(directory)
        training.writer._segment_bytes = 20_000
        resource.setrlimit(resource.RLIMIT_NOFILE, (training.writer._fd + 1, 4096))
        taken = []
        try:
            while True: taken.append(os.dup(0))
        except OSError: pass
        for number in range(100): training.step(number)
        for fd in taken: os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
        for number in range(100, 200): training.step(number)
    """
    child = start_training(tmp_path, code, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    _, errors = child.communicate()
    assert (child.returncode, errors) == (0, b"")
    run = Run(tmp_path)
    assert [step.number for step in run.steps()] == list(range(200))
    assert len(list(tmp_path.glob("*.sonde"))) > 1


def test_r44_a_forked_child_never_writes_to_its_parents_log(tmp_path):
    code = """
        training = Training(directory)
        training.step(0)
        training.writer.event("log", 1, {"text": "pending at the fork"})
        for _ in range(20):
            if os.fork() == 0:
                training.step(77)
                training.writer.event("end", 77, {})
                training.writer.close()
                os._exit(0)
            os.wait()
        training.step(1)
        training.writer.close()
    """
    assert start_training(tmp_path, code).wait() == 0
    run = Run(tmp_path)
    assert [step.number for step in run.steps()] == [0, 1]
    assert [event.kind for event in run.events()] == ["log"]
