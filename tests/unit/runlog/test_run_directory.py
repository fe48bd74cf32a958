"""Run directories: never shared by accident, found again by name."""

import json
import os

import pytest

from sonde.errors import NoRunError, SondeError
from sonde.runlog.run_directory import find_run, new_run_directory, newest_run, open_run_directory, runs_in, write_run_json
from sonde.runlog.writer import Writer


def make(parent, name, started):
    path = parent / name
    path.mkdir(parents=True)
    write_run_json(path, {"started": started})
    return path


def test_new_directories_are_named_after_time_and_run(tmp_path):
    path = new_run_directory(tmp_path / "deep" / "runs", "my run/../x")
    assert path.is_dir()
    assert path.parent == tmp_path / "deep" / "runs"
    date, time, name, random = path.name.split("_")
    assert (len(date), len(time), name) == (10, 8, "my-run-..-x")
    int(random, 16)


def test_two_in_the_same_second_differ_even_when_chance_repeats_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda num_bytes: "00" * num_bytes)
    monkeypatch.setattr("time.strftime", lambda *_: "2026-01-01_00-00-00")
    assert len({new_run_directory(tmp_path, "x") for _ in range(10)}) == 10


def test_the_place_that_a_user_names_is_made_or_added_to(tmp_path):
    path = open_run_directory(tmp_path / "a" / "b")
    Writer(path).close()
    assert open_run_directory(path) == path


def test_a_foreign_directory_is_refused_and_a_file_too(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(SondeError, match=r"contains other files \(thesis.tex\) and is not a run"):
        open_run_directory(tmp_path)
    with pytest.raises(SondeError, match="it is a file"):
        open_run_directory(tmp_path / "thesis.tex")
    with pytest.raises(SondeError, match="cannot be written"):
        open_run_directory(tmp_path / "thesis.tex" / "x")


def test_run_json_is_whole_and_written_once(tmp_path):
    write_run_json(tmp_path, {"argv": ["a"], "lone": "\ud800"})
    write_run_json(tmp_path, {"argv": ["b"]})
    assert os.listdir(tmp_path) == ["run.json"]
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["argv"], content["format"], content["lone"]) == (["a"], 1, "\ud800")


def test_the_newest_run_is_the_one_that_started_last(tmp_path):
    make(tmp_path, "b", 2.0)
    newest = make(tmp_path, "a", 3.0)
    make(tmp_path, "c", 1.0)
    (tmp_path / "not-a-run").mkdir()
    assert newest_run(tmp_path) == newest
    assert [path.name for path in runs_in(tmp_path)] == ["a", "b", "c"]
    assert newest_run(newest) == newest


def test_a_missing_run_is_explained(tmp_path):
    with pytest.raises(NoRunError, match=r'No run in .*"sonde run train\.py"'):
        newest_run(tmp_path)
    with pytest.raises(NoRunError, match="there is no directory"):
        newest_run(tmp_path / "missing")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(NoRunError, match=r"train\.py is a file, but not the log of a run"):
        find_run(str(tmp_path / "train.py"))


def test_a_run_is_found_by_path_name_or_part_of_a_name(tmp_path):
    base = make(tmp_path, "2026-01-01_base_00aa", 1.0)
    other = make(tmp_path, "2026-01-02_other_00bb", 2.0)
    assert find_run(str(base), tmp_path) == base
    assert find_run(base.name, tmp_path) == base
    assert find_run("00bb", tmp_path) == other
    script = make(tmp_path, "2026-01-01_my-script_00cc", 0.5)
    assert find_run("my_script", tmp_path) == find_run("my_script_00cc", tmp_path) == script
    assert find_run(None, tmp_path) == other
    assert find_run(str(tmp_path), tmp_path / "elsewhere") == other
    with pytest.raises(NoRunError, match=r"matches 3 runs .* Type more of the name"):
        find_run("2026", tmp_path)
    with pytest.raises(NoRunError, match="Nearest: 2026-01-01_base_00aa"):
        find_run("2026-01-01_bsae_00aa", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRunError, match=r"expected run\.json"):
        find_run(str(tmp_path / "empty"), tmp_path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b'{"started": "x"}', b"[" * 100_000])
def test_a_broken_run_json_does_not_hide_the_run(tmp_path, content):
    path = make(tmp_path, "a", 1.0)
    (path / "run.json").write_bytes(content)
    assert runs_in(tmp_path) == [path]
