"""Every patch turns its broken program into the fixed one, and a patch that does not fit is refused."""

from __future__ import annotations

import pytest

from fixed_programs import PROGRAMS, PatchError, apply_patch, fix_of, write_fixed

TEXT = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
PATCH = "--- a.py\n+++ a.py\n@@ -1,2 +1,3 @@\n one\n+new\n two\n@@ -6,2 +7 @@\n-six\n seven\n"


def test_every_patch_belongs_to_a_program_and_applies(tmp_path):
    patches = sorted(PROGRAMS.rglob("*.patch"))
    assert len(patches) > 100
    programs = [patch.with_name(patch.name.removesuffix(".fix.patch") + ".py") for patch in patches]
    for program in programs:
        assert write_fixed(program, tmp_path).read_text(encoding="utf-8") != program.read_text(encoding="utf-8")


def test_a_patch_adds_and_removes_lines():
    assert apply_patch(TEXT, PATCH) == "one\nnew\ntwo\nthree\nfour\nfive\nseven\n"


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (PATCH.replace("-six", "-sixth"), "does not have these lines at line 6:\nsixth\nseven"),
        (PATCH.replace("@@ -6,2 +7 @@", "@@ -5,2 +6 @@"), "does not have these lines at line 5"),
        (PATCH.replace("@@ -1,2 +1,3 @@", "@@ -1,3 +1,4 @@"), "does not have the lines that its header counts"),
        (PATCH.replace("\n one", "\none"), "does not have the lines that its header counts"),
        (PATCH.replace("@@ -6,2 +7 @@", "@@ six @@"), "is no header of a hunk"),
        (TEXT, "no unified diff"),
        ("--- a.py\n+++ a.py\n", "no unified diff"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(patch, message):
    with pytest.raises(PatchError, match=message):
        apply_patch(TEXT, patch)


def test_the_error_names_the_patch(tmp_path, monkeypatch):
    (tmp_path / "programs" / "broken").mkdir(parents=True)
    program = tmp_path / "programs" / "broken" / "a.py"
    program.write_text("two\n")
    fix_of(program).write_text(PATCH)
    monkeypatch.setattr("fixed_programs.PROGRAMS", tmp_path / "programs")
    with pytest.raises(PatchError, match=r"broken/a\.fix\.patch: the program does not have"):
        write_fixed(program, tmp_path / "copy")
