"""The writer: what it takes over is on disk, what it cannot write is counted, and it never raises."""

import errno
import logging
import os
import threading

import numpy as np
import pytest

from sonde.errors import SondeError
from sonde.events import STATISTICS, Ended, NonFinite, Site
from sonde.runlog import record_format as f
from sonde.runlog import writer as writing
from sonde.runlog.run_reader import Run
from sonde.runlog.writer import Writer

LOSS = Site(0, "scalar", "loss")
WEIGHT = Site(1, "parameter", "fc.weight")


class Training:
    """Writes steps with one scalar and one parameter."""

    def __init__(self, directory, **rest):
        self.writer = Writer(directory, manifest={"sonde": "0.1.0"}, **rest)
        self.writer.sites([LOSS, WEIGHT])
        self.scalars = self.writer.plan("step", ("value",), [0])
        self.weights = self.writer.plan("parameter", STATISTICS, [1])

    def step(self, number):
        self.writer.frame(self.weights, number, np.full((1, 9), float(number)))
        self.writer.frame(self.scalars, number, np.array([[number / 10]]))
        self.writer.flush()


class FailingDisk:
    """Stands in for os.write, the one seam: the listed calls fail."""

    def __init__(self, monkeypatch, *, calls=(), error=errno.ENOSPC, take=None):
        self.calls, self.error, self.take, self.num_calls = calls, error, take, 0
        monkeypatch.setattr(writing, "_write", self)

    def __call__(self, fd, data):
        self.num_calls += 1
        if self.num_calls not in self.calls:
            return os.write(fd, data)
        if self.take:
            return os.write(fd, data[: self.take])
        raise OSError(self.error, os.strerror(self.error))


def test_a_step_is_one_write(tmp_path, monkeypatch):
    training = Training(tmp_path)
    training.step(0)
    disk = FailingDisk(monkeypatch)
    for number in range(1, 11):
        training.step(number)
    assert disk.num_calls == 10


def test_what_was_flushed_is_readable_at_once(tmp_path):
    training = Training(tmp_path)
    for number in range(3):
        training.step(number)
        assert Run(tmp_path).last_step == number


def test_nothing_to_flush_writes_nothing(tmp_path, monkeypatch):
    training = Training(tmp_path)
    training.writer.flush()
    disk = FailingDisk(monkeypatch)
    training.writer.flush()
    training.writer.close()
    assert disk.num_calls == 0


def test_a_failed_write_is_counted_and_said_once_writing_works(tmp_path, monkeypatch, caplog):
    training = Training(tmp_path)
    training.step(0)
    FailingDisk(monkeypatch, calls={1, 2, 3})
    with caplog.at_level(logging.WARNING, "sonde"):
        for number in range(1, 6):
            training.step(number)
    training.writer.close()
    run = Run(tmp_path)
    assert [step.number for step in run.steps()] == [0, 4, 5]
    (gap,) = run.gaps
    assert (gap.num_dropped, gap.first_step, gap.last_step) == (6, 1, 3)
    assert "No space left" in gap.reason
    assert training.writer.num_dropped == 6
    assert len(caplog.records) == 1
    assert not run.damage


@pytest.mark.parametrize("taken", [1, 15, 16, 17, 60, 130, 180])
def test_a_torn_write_leaves_whole_records_alone(tmp_path, monkeypatch, taken):
    training = Training(tmp_path)
    training.step(0)

    class Torn(FailingDisk):
        def __call__(self, fd, data):
            self.num_calls += 1
            if self.num_calls == 1:
                return os.write(fd, data[:taken])
            if self.num_calls == 2:
                raise OSError(errno.ENOSPC, "full")
            return os.write(fd, data)

    Torn(monkeypatch)
    training.step(1)
    assert not Run(tmp_path).torn
    training.step(2)
    training.writer.close()
    run = Run(tmp_path)
    assert [step.number for step in run.steps()] == [0, 2]
    assert (run.damage, run.torn) == ([], [])
    num_kept = sum(frame.step == 1 for frame in run.frames("parameter"))
    assert run.gaps[0].num_dropped == 2 - num_kept


def test_a_short_write_is_completed_where_the_disk_lets_it(tmp_path, monkeypatch):
    training = Training(tmp_path)
    FailingDisk(monkeypatch, calls={1, 2}, take=20)
    training.step(0)
    training.step(1)
    run = Run(tmp_path)
    assert (run.last_step, run.gaps, run.damage) == (1, [], [])


def test_where_cutting_is_impossible_readers_find_their_way(tmp_path, monkeypatch):
    def no_truncate(*_):
        raise OSError(errno.EPERM, "append only")

    training = Training(tmp_path)
    training.step(0)
    monkeypatch.setattr(os, "ftruncate", no_truncate)

    calls = iter([30, 0])

    def torn(fd, data):
        taken = next(calls, len(data))
        return os.write(fd, data[:taken]) if taken else 0

    monkeypatch.setattr(writing, "_write", torn)
    training.step(1)
    assert len(Run(tmp_path).torn) == 1
    training.step(2)
    run = Run(tmp_path)
    assert [step.number for step in run.steps()] == [0, 2]
    assert [damage.num_bytes for damage in run.damage] == [30]
    assert run.gaps[0].num_dropped == 2


def test_sites_that_were_lost_are_written_again(tmp_path, monkeypatch):
    training = Training(tmp_path)  # its sites are still to be written
    FailingDisk(monkeypatch, calls={1})
    training.step(0)
    training.step(1)
    run = Run(tmp_path)
    assert run.sites == {0: LOSS, 1: WEIGHT}
    assert next(run.steps()).scalars == {"loss": 0.1}
    assert run.gaps[0].num_dropped == 3


def test_the_count_is_exact_when_the_gap_record_itself_cannot_be_written(tmp_path, monkeypatch):
    training = Training(tmp_path)
    training.step(0)
    for take in range(1, 900, 7):
        state = {"left": take}

        def full_disk(fd, data, state=state):
            num = min(state["left"], len(data))
            state["left"] -= num
            if num == 0:
                raise OSError(errno.ENOSPC, "full")
            return os.write(fd, data[:num])

        monkeypatch.setattr(writing, "_write", full_disk)
        for number in range(1, 4):
            training.step(number)
    monkeypatch.setattr(writing, "_write", os.write)
    training.writer.close()
    run = Run(tmp_path)
    assert (run.damage, run.torn) == ([], [])
    num_written = sum(1 for kind in run.kinds for _ in run.frames(kind))
    num_made = 2 + 2 * 3 * len(range(1, 900, 7))
    assert num_written + training.writer.num_dropped == num_made
    assert sum(gap.num_dropped for gap in run.gaps) == training.writer.num_dropped


def test_on_a_full_disk_the_gap_the_events_and_the_end_replace_the_last_steps(tmp_path, monkeypatch):
    training = Training(tmp_path)
    for number in range(200):
        training.step(number)
    room = training.writer.path.stat().st_size

    def full_disk(fd, data):
        num = min(max(room - os.fstat(fd).st_size, 0), len(data))
        if num == 0:
            raise OSError(errno.ENOSPC, "full")
        return os.write(fd, data[:num])

    monkeypatch.setattr(writing, "_write", full_disk)
    for number in range(200, 400):
        training.writer.emit(NonFinite(what="loss", where="loss"), number)
        training.step(number)
    training.writer.emit(Ended(how="finished", exit_code=0, exception=""), 400)
    training.writer.close()
    run = Run(tmp_path)
    assert (run.damage, run.torn, training.writer.unwritten_gap) == ([], [], None)
    assert run.ended.how == "finished"
    assert next(run.events(NonFinite)).step == 200
    numbers = [step.number for step in run.steps()]
    assert numbers == list(range(len(numbers)))
    assert 0 < len(numbers) < 200
    assert (run.gaps[-1].first_step, run.gaps[-1].last_step) == (len(numbers), 400)
    assert run.sites == {0: LOSS, 1: WEIGHT}


def test_a_full_segment_is_followed_by_one_that_can_be_read_alone(tmp_path):
    training = Training(tmp_path, segment_bytes=2000)
    for number in range(50):
        training.step(number)
    training.writer.close()
    paths = sorted(tmp_path.glob("*.sonde"))
    assert len(paths) > 3
    assert [step.number for step in Run(tmp_path).steps()] == list(range(50))
    last = Run(paths[-1])
    assert last.sites == {0: LOSS, 1: WEIGHT}
    assert last.manifests[0]["segment"] == len(paths) - 1
    assert last.last_step == 49


def test_a_segment_that_cannot_be_opened_makes_the_old_one_grow(tmp_path, monkeypatch):
    training = Training(tmp_path, segment_bytes=2000)

    def no_more_files(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", no_more_files)
    for number in range(50):
        training.step(number)
    monkeypatch.undo()
    run = Run(tmp_path)
    assert (run.last_step, run.gaps, len(list(tmp_path.glob("*.sonde")))) == (49, [], 1)
    for number in range(50, 70):
        training.step(number)
    assert [step.number for step in Run(tmp_path).steps()] == list(range(70))
    assert len(list(tmp_path.glob("*.sonde"))) > 1


def test_what_cannot_be_encoded_is_dropped_and_counted(tmp_path):
    class Unspeakable:
        def __str__(self):
            raise RuntimeError("no")

    training = Training(tmp_path)
    training.writer.frame(training.weights, 0, np.zeros((5, 5)))
    training.writer.event("log", 0, {"value": Unspeakable()})
    training.writer.frame(training.writer.plan("x", ("a,b",), [1]), 0, np.zeros((1, 1)))
    training.writer.frame(training.weights, 2**70, np.zeros((1, 9)))
    training.step(1)
    run = Run(tmp_path)
    assert run.gaps[0].num_dropped == 4
    assert run.last_step == 1


def test_memory_errors_are_contained(tmp_path, monkeypatch):
    training = Training(tmp_path)

    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(writing, "_write", no_memory)
    training.step(0)
    monkeypatch.undo()
    training.step(1)
    run = Run(tmp_path)
    assert run.gaps[0].reason == "MemoryError"
    assert [step.scalars for step in run.steps()] == [{"loss": 0.1}]


def test_ctrl_c_reaches_the_user_and_what_it_hit_counts_as_lost(tmp_path, monkeypatch):
    training = Training(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    training.step(0)
    monkeypatch.setattr(writing, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        training.step(1)
    monkeypatch.undo()
    training.step(2)
    run = Run(tmp_path)
    assert [step.number for step in run.steps()] == [0, 2]
    assert run.gaps[0].num_dropped == 2


def test_the_next_process_of_a_rank_is_another_attempt(tmp_path):
    for _ in range(3):
        Writer(tmp_path).close()
    Writer(tmp_path, rank=1, world_size=2).close()
    assert [(manifest["rank"], manifest["attempt"]) for manifest in Run(tmp_path).manifests] == [
        (0, 0), (1, 0), (0, 1), (0, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["missing", "file", "file/inside"])
def test_a_bad_directory_is_refused_by_the_constructor(tmp_path, place):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SondeError, match=f"cannot be written to .*{place}.*Name another directory"):
        Writer(tmp_path / place)


def test_a_disk_that_is_full_at_opening_is_a_letter_and_leaves_nothing(tmp_path, monkeypatch):
    FailingDisk(monkeypatch, calls={1})
    with pytest.raises(SondeError, match="No space left"):
        Writer(tmp_path)
    FailingDisk(monkeypatch, calls={1}, take=5)
    with pytest.raises(SondeError, match=r"[Nn]o space left"):
        Writer(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_closed_writer_does_nothing(tmp_path):
    training = Training(tmp_path)
    training.step(0)
    training.writer.close()
    training.writer.close()
    training.step(1)
    training.writer.event("log", 1, {})
    assert Run(tmp_path).last_step == 0


def test_memory_stays_bounded_when_nobody_flushes(tmp_path):
    writer = Writer(tmp_path)
    for number in range(30):
        writer.event("log", number, {"text": "x" * 20_000, "more": ["y" * 1000] * 500})
    assert sum(map(len, writer._pending)) <= writing.PENDING_BYTES
    assert any(Run(tmp_path).events("log"))


def test_threads_may_write_at_once(tmp_path):
    writer = Writer(tmp_path)

    def work(thread):
        for number in range(300):
            writer.event("log", number, {"thread": thread})
            writer.flush()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    run = Run(tmp_path)
    assert (sum(1 for _ in run.events("log")), run.damage, run.gaps) == (2400, [], [])


def test_step_and_batch_frames_keep_all_their_bits(tmp_path):
    writer = Writer(tmp_path)
    value = 2.0**52 - 1
    for kind in ("step", "batch"):
        writer.frame(writer.plan(kind, ("value",), [0]), 0, np.array([[value]]))
    writer.flush()
    assert [frame.values[0, 0] for kind in ("step", "batch") for frame in Run(tmp_path).frames(kind)] == [value, value]


def test_the_header_comes_first(tmp_path):
    writer = Writer(tmp_path)
    assert writer.path.read_bytes().startswith(f.header())


def test_a_descriptor_that_the_script_closed_is_opened_again_and_its_files_stay_its_own(tmp_path):
    writer = Writer(tmp_path)
    writer.event("log", 0, {"text": "before"})
    writer.flush()
    taken = writer._fd
    os.close(taken)  # as os.closerange does
    mine = os.open(tmp_path / "mine.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(mine, taken)  # and the script's next file gets the number
    writer.event("log", 1, {"text": "after"})
    writer.close()
    os.write(taken, b"still open")
    assert (tmp_path / "mine.txt").read_bytes() == b"still open"
    run = Run(tmp_path)
    assert [event.data["text"] for event in run.events("log")] == ["before", "after"]
    assert (writer.num_dropped, run.damage) == (0, [])
    os.close(mine)
    os.close(taken)


def test_a_closed_log_whose_file_was_replaced_is_not_written(tmp_path, caplog):
    writer = Writer(tmp_path)
    writer.event("log", 0, {"text": "before"})
    writer.flush()
    os.close(writer._fd)
    writer.path.rename(tmp_path / "moved")
    writer.path.write_bytes(b"not a log of Sonde")
    writer.event("log", 1, {"text": "after"})
    writer.close()
    assert writer.path.read_bytes() == b"not a log of Sonde"
    assert writer.num_dropped == 1
    assert "replaced by another file" in caplog.text


def test_a_log_leaves_the_low_descriptors_to_the_script(tmp_path):
    free = os.dup(0)
    os.close(free)
    writer = Writer(tmp_path)
    first = os.open(tmp_path / "mine.txt", os.O_WRONLY | os.O_CREAT)
    assert first == free
    os.close(first)
    writer.close()
