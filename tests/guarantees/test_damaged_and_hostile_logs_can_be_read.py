"""R36–R39: the reader takes what it gets: cut off, damaged, hostile, growing, or not a file at all."""

import os
import socket
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sample_logs import log_of, records, write_log
from sonde.errors import SondeError
from sonde.runlog import record_format as f
from sonde.runlog.find_record_boundaries import scan
from sonde.runlog.run_reader import Run

PARTS = records(120)
LOG = log_of(PARTS)
NUM_INDEXED = sum(part[4] in (f.FRAME, f.EVENT) for part in PARTS)


def ends_of_records():
    end = f.HEADER_BYTES
    yield end
    for part in PARTS:
        end += len(part)
        yield end


ENDS = list(ends_of_records())


def everything(run):
    """Reads all that can be asked for, as a check that nothing of it raises."""
    num = sum(1 for _ in run.events()) + sum(1 for kind in run.kinds for _ in run.frames(kind))
    for step in run.steps():
        for kind in step.frames:
            step.table(kind)
    run.scalar("loss")
    run.series("gradient", "layer1.weight", "l2")
    assert (run.ended.how, run.gaps, run.damage, run.torn, run.ranks) is not None
    return num


def test_r36_every_prefix_gives_exactly_the_whole_records_in_it():
    assert len(LOG) > 15_000
    num_whole = 0
    for length in range(f.HEADER_BYTES, len(LOG) + 1):
        while num_whole < len(PARTS) and ENDS[num_whole + 1] <= length:
            num_whole += 1
        # from the last record that is surely settled: the whole prefix again for each offset would be the square of the file
        base = ENDS[max(0, num_whole - 3)]
        result = scan(LOG[base:length])
        assert not result.damage
        assert base + result.offset == ENDS[num_whole]
        assert len(result.records) == min(num_whole, 3)


def test_r36_a_run_can_be_opened_at_every_length(tmp_path):
    path = write_log(tmp_path, b"") / "rank0-h-1-1-000.sonde"
    some = sorted({*range(500), *(end + d for end in ENDS for d in (-1, 0)), *range(0, len(LOG), 297), len(LOG)})
    for length in some:
        path.write_bytes(LOG[:length])
        run = Run(tmp_path)
        num_whole = sum(end <= length for end in ENDS) - 1
        whole = PARTS[: max(0, num_whole)]
        assert len(run._processes["rank0-h-1-1"].segments[0]) == sum(part[4] in (f.FRAME, f.EVENT) for part in whole)
        assert not run.damage
        assert bool(run.torn) == (length > 0 and length not in ENDS)


damages = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, len(LOG) * 8 - 1)),
        st.tuples(st.just("zero"), st.integers(0, len(LOG)), st.integers(1, 4096)),
        st.tuples(st.just("remove"), st.integers(0, len(LOG)), st.integers(1, 3000)),
        st.tuples(st.just("repeat"), st.integers(0, len(LOG)), st.integers(1, 3000)),
        st.tuples(st.just("insert"), st.integers(0, len(LOG)), st.binary(min_size=1, max_size=200)),
        st.tuples(st.just("marker"), st.integers(0, len(LOG)), st.integers(0, 2**32 - 1)),
    ),
    min_size=1,
    max_size=4,
)


def damaged(data, damage):
    what, at, *rest = damage
    if what == "flip":
        if at // 8 < len(data):
            data = bytearray(data)
            data[at // 8] ^= 1 << at % 8
        return bytes(data)
    if what == "zero":
        return data[:at] + bytes(min(rest[0], max(0, len(data) - at))) + data[at + rest[0] :]
    if what == "remove":
        return data[:at] + data[at + rest[0] :]
    if what == "repeat":
        return data[: at + rest[0]] + data[at:]
    if what == "insert":
        return data[:at] + rest[0] + data[at:]
    return data[:at] + f.MARKER + b"\3\0\0\0" + rest[0].to_bytes(4, "little") + data[at:]


@given(damages)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_r37_all_undamaged_records_are_recovered_from_any_damage(tmp_path, damage_list):
    data = LOG
    for damage in damage_list:
        data = damaged(data, damage)
    result = scan(data, f.HEADER_BYTES if data[: f.HEADER_BYTES] == LOG[: f.HEADER_BYTES] else 0)
    found = [data[record.start - f.RECORD_BYTES : record.end] for record in result.records]
    intact = [part for part in set(PARTS) if part in data]
    # what is found was written, and what is still there as a whole is found
    assert set(found) <= set(PARTS)
    assert set(found) >= set(intact)
    run = Run(write_log(tmp_path, data))
    assert everything(run) == sum(record.type in (f.FRAME, f.EVENT) for record in result.records)
    settled = sum(damage.num_bytes for damage in run.damage) + sum(torn.num_bytes for torn in run.torn)
    header = 0 if f.version_of(data[:16]) is None else f.HEADER_BYTES
    assert header + settled + sum(map(len, found)) == len(data)  # every byte is accounted for


@given(st.binary(max_size=3000))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_r37_random_bytes_are_no_run_and_no_crash(tmp_path, data):
    everything(Run(write_log(tmp_path, data)))
    everything(Run(write_log(tmp_path, f.header() + data)))


@given(st.integers(0, 6), st.binary(max_size=300))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_r37_a_right_checksum_over_nonsense_is_damage_and_no_crash(tmp_path, type_, payload):
    run = Run(write_log(tmp_path, log_of([PARTS[0], f.record(type_, payload), *PARTS[1:20]])))
    everything(run)
    assert run.sites[0].path == "loss"


CORPUS = {
    "zero pages in the middle": LOG[:4000] + bytes(8192) + LOG[4000:],
    "only zeros": bytes(10_000),
    "zeros after the header": f.header() + bytes(10_000),
    "a length of almost two gigabytes": LOG + f.MARKER + b"\3\0\0\0" + (1_919_251_561).to_bytes(4, "little") + bytes(4) + LOG,
    "two logs in one": LOG + LOG,
    "a log without its header": LOG[f.HEADER_BYTES :],
    "markers alone": f.MARKER * 5000,
    "records that claim all the rest": (f.MARKER + b"\3\0\0\0" + (1 << 20).to_bytes(4, "little") + bytes(4)) * 5000 + LOG,
    "a frame with four billion sites": log_of(
        [*PARTS[:5], f.record(f.FRAME, b"\0" * 16 + b"\4\0" + b"\1\0\1\0\0\0" + b"\xff\xff\xff\xff" + b"kf" + bytes(50))]
    ),
    "deep json": log_of([*PARTS[:2], f.record(f.EVENT, b"[" * 100_000), f.record(f.SITES, b'{"a":' * 50_000)]),
    "huge numbers": log_of(
        [f.record(f.EVENT, b'{"kind":"x","step":1' + b"0" * 5000 + b',"data":{}}'), f.record(f.GAP, b'{"num_dropped":1e999}')]
    ),
    "steps at the ends of 64 bits": log_of(
        [*PARTS[:2], f.event_record("a", -(2**63), 0, {}), f.event_record("b", 2**63 - 1, 0, {}), *PARTS[2:]]
    ),
}


@pytest.mark.parametrize("name", CORPUS)
def test_r37_the_corpus_is_read_without_harm(tmp_path, name):
    run = Run(write_log(tmp_path, CORPUS[name]))
    num = everything(run)
    if LOG[f.HEADER_BYTES + 5000 :] in CORPUS[name]:
        assert num > NUM_INDEXED // 2


def test_r38_a_torn_tail_waits_and_damage_is_reported(tmp_path):
    torn = Run(write_log(tmp_path / "torn", LOG[:-7]))
    assert (len(torn.torn), torn.damage) == (1, [])
    corrupt = Run(write_log(tmp_path / "corrupt", LOG[:5000] + b"\xff" + LOG[5001:]))
    assert (corrupt.torn, len(corrupt.damage)) == ([], 1)
    (damage,) = corrupt.damage
    assert damage.offset <= 5000 < damage.offset + damage.num_bytes
    assert damage.file.name == "rank0-h-1-1-000.sonde"
    write_log(tmp_path / "torn", LOG)
    torn.refresh()
    assert (torn.torn, torn.damage, torn.ended.how) == ([], [], "finished")


def test_r39_whatever_has_a_logs_name_neither_blocks_nor_misleads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path, LOG)
    os.mkfifo(tmp_path / "rank1-h-1-1-000.sonde")
    os.symlink("/dev/zero", tmp_path / "rank2-h-1-1-000.sonde")
    os.symlink(tmp_path / "rank0-h-1-1-000.sonde", tmp_path / "rank3-h-1-1-000.sonde")
    (tmp_path / "rank4-h-1-1-000.sonde").mkdir()
    (tmp_path / "rank5-h-1-1-000.sonde").write_bytes(b"")
    os.symlink("nowhere", tmp_path / "rank6-h-1-1-000.sonde")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("rank7-h-1-1-000.sonde")  # the name of a socket must be short, so not with its path
    os.mkfifo(tmp_path / "run.json")
    run = Run(tmp_path)
    assert everything(run) == NUM_INDEXED
    assert run.ranks == [0]
    assert {damage.file.name[:5] for damage in run.damage} == {"run.j", *(f"rank{i}" for i in (1, 2, 3, 4, 6, 7))}
    assert run.refresh() == 0


def test_r39_a_pipe_or_a_device_is_no_run(tmp_path):
    os.mkfifo(tmp_path / "pipe.sonde")
    for path in (tmp_path / "pipe.sonde", "/dev/zero", "/dev/null"):
        with pytest.raises(SondeError, match="neither a directory nor a file"):
            Run(path)


def test_r39_a_record_type_from_the_future_is_passed_over_and_counted(tmp_path):
    run = Run(write_log(tmp_path, log_of([*PARTS[:10], f.record(200, b"new"), *PARTS[10:]])))
    assert (run.num_unknown, run.damage) == (1, [])
    assert everything(run) == NUM_INDEXED


def test_r39_a_format_from_the_future_is_a_letter(tmp_path):
    with pytest.raises(SondeError, match="is a run of format 3; this version reads up to 1"):
        Run(write_log(tmp_path, f.header(3) + LOG[f.HEADER_BYTES :]))


def test_r39_reading_while_it_is_written_sees_every_record_once(tmp_path):
    path = write_log(tmp_path, b"") / "rank0-h-1-1-000.sonde"
    read_on = threading.Event()

    def write():
        with open(path, "ab", buffering=0) as file:
            for start in range(0, len(LOG), 331):
                file.write(LOG[start : start + 331])
                read_on.wait(0.001)

    run = Run(tmp_path)
    writer = threading.Thread(target=write)
    writer.start()
    num_seen = 0
    while writer.is_alive():
        num_seen += run.refresh()
        assert not run.damage
    writer.join()
    num_seen += run.refresh()
    assert num_seen == NUM_INDEXED
    assert run.torn == []
