"""Compaction: the same facts by column, whole or not at all."""

import builtins
import json
import math
import os

import numpy as np
import pytest

from sonde.errors import SondeError
from sonde.events import Site
from sonde.export import parquet as compaction
from sonde.export.parquet import compact
from sonde.runlog.writer import Writer

pq = pytest.importorskip("pyarrow.parquet")

ODD = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-300, 1.5]


def write(directory, *, end=True):
    directory.mkdir(exist_ok=True)
    writer = Writer(directory)
    writer.sites([Site(i, "parameter", f"p{i}\ud800", "net", shape=(2, i)) for i in range(3)])
    one, two = writer.plan("gradient", ("l2", "mean"), [0, 1, 2]), writer.plan("gradient", ("l2", "step"), [2, 7])
    for number, value in enumerate(ODD):
        writer.frame(one, number, np.array([[value, number], [1.0, 2.0], [3.0, 4.0]]))
        writer.frame(two, number, np.array([[5.0, value], [6.0, value]]))
        writer.frame(writer.plan("../evil\x00kind", ("x",), [0]), number, np.array([[value]]))
        writer.flush()
    writer.event("log", 3, {"text": "\ud800", "nan": math.nan})
    if end:
        writer.event("end", 6, {"how": "finished"})
    writer.close()
    return directory


def test_every_number_is_in_its_column(tmp_path):
    paths = compact(write(tmp_path))
    table = pq.read_table(tmp_path / "frames-gradient.parquet").to_pylist()
    assert len(table) == 5 * len(ODD)
    first = sorted((row["step"], row["l2"]) for row in table if row["site"] == 0)
    assert repr([value for _, value in first]) == repr(ODD)
    assert {row["path"] for row in table} == {"p0\\ud800", "p1\\ud800", "p2\\ud800", None}
    with_step = [row for row in table if row["step_"] is not None]
    assert len(with_step) == 2 * len(ODD)
    assert all(row["mean"] is None for row in with_step)
    assert all(path.parent == tmp_path for path in paths)
    assert sorted(path for path in tmp_path.iterdir() if path.suffix == ".parquet") == paths


@pytest.mark.parametrize(("num_kinds", "num_fields"), [(201, 1), (1, 1001)])
def test_a_log_with_too_many_kinds_or_fields_is_refused_and_nothing_is_written(num_kinds, num_fields, tmp_path):
    writer = Writer(tmp_path)
    fields = [f"f{i}" for i in range(num_fields)]
    for kind in range(num_kinds):
        writer.frame(writer.plan(f"kind{kind}", fields, [0]), 0, np.zeros((1, num_fields)))
    writer.event("end", 0, {"how": "finished"})
    writer.close()
    with pytest.raises(SondeError, match="at most"):
        compact(tmp_path)
    assert not list(tmp_path.glob("*.parquet"))


def test_events_and_sites_come_along(tmp_path):
    compact(write(tmp_path))
    events = pq.read_table(tmp_path / "events.parquet").to_pylist()
    assert [event["kind"] for event in events] == ["log", "end"]
    assert json.loads(events[0]["data"])["text"] == "\ud800"
    sites = pq.read_table(tmp_path / "sites.parquet").to_pylist()
    assert [site["shape"] for site in sites] == [[2, 0], [2, 1], [2, 2]]


def test_large_runs_are_written_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "ROWS", 4)
    compact(write(tmp_path))
    file = pq.ParquetFile(tmp_path / "frames-gradient.parquet")
    assert file.num_row_groups > 5
    assert file.metadata.num_rows == 5 * len(ODD)


def test_a_run_that_is_still_written_is_refused(tmp_path):
    with pytest.raises(SondeError, match="still being written"):
        compact(write(tmp_path, end=False))


def test_compacting_twice_gives_the_same_files(tmp_path):
    assert compact(write(tmp_path)) == compact(tmp_path)


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    write(tmp_path)
    before = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SondeError, match="No space left"):
        compact(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_without_pyarrow_the_user_is_told_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def no_pyarrow(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_pyarrow)
    with pytest.raises(SondeError, match=r"pip install 'sonde\[parquet\]'"):
        compact(tmp_path)
