"""A report file is whole or not there, and nobody's work is lost to it."""

import os

import pytest

from sonde.errors import SondeError
from sonde.render.safe_write import replace_file, write_new


def test_a_new_file_holds_the_text(tmp_path):
    write_new(tmp_path / "report.md", "größe ✓")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "größe ✓"


def test_r72_an_existing_file_is_refused_and_kept(tmp_path):
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(SondeError, match=r"exists already.*replace=True"):
        write_new(tmp_path / "report.md", "new")
    assert (tmp_path / "report.md").read_text() == "mine"


@pytest.mark.parametrize("path", [None, "", 3])
def test_what_is_no_path_is_refused_with_an_example(path):
    with pytest.raises(SondeError, match=r"needs a path, not .*\nPass|needs a path, not .* Pass a name"):
        replace_file(path, "new")


def test_an_existing_file_is_replaced_on_demand_and_nothing_else_is_left(tmp_path):
    (tmp_path / "report.md").write_text("mine")
    write_new(tmp_path / "report.md", "new", replace=True)
    assert (tmp_path / "report.md").read_text() == "new"
    assert os.listdir(tmp_path) == ["report.md"]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("dangling", [False, True])
def test_r72_a_symbolic_link_is_never_followed(tmp_path, replace, dangling):
    target = tmp_path / "target.txt"
    if not dangling:
        target.write_text("precious")
    (tmp_path / "report.md").symlink_to(target)
    with pytest.raises(SondeError, match="symbolic link"):
        write_new(tmp_path / "report.md", "new", replace=replace)
    assert target.exists() is not dangling
    assert dangling or target.read_text() == "precious"


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_or_a_missing_directory_gets_a_letter(tmp_path, replace):
    with pytest.raises(SondeError, match="is a directory"):
        write_new(tmp_path, "text", replace=replace)
    with pytest.raises(SondeError, match="cannot be written: No such file"):
        write_new(tmp_path / "missing" / "report.md", "text", replace=replace)


def test_a_full_disk_leaves_no_half_report_and_keeps_the_old_one(tmp_path):
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    (tmp_path / "report.md").write_text("mine")
    child = os.fork()
    if child == 0:  # a limit on the size of files is as good as a full disk, and ends with this process
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        refused = 0
        for name, replace in (("new.md", False), ("report.md", True)):
            try:
                write_new(tmp_path / name, "x" * 100_000, replace=replace)
            except SondeError as error:
                refused += "cannot be written" in str(error)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert os.listdir(tmp_path) == ["report.md"]
    assert (tmp_path / "report.md").read_text() == "mine"
