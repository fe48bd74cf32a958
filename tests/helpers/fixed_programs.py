"""The fixed twin of a broken program is a patch beside it (`mlp.py`, `mlp.fix.patch`), applied to a copy when a test needs the program.

A new patch:  diff -u --label mlp.py mlp.py --label mlp.py fixed.py > mlp.fix.patch
"""

from __future__ import annotations

import re
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "programs"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """A patch that does not fit its program."""


def fix_of(program: Path) -> Path:
    """Where the patch of a broken program is, or would be."""
    return program.with_suffix(".fix.patch")


def write_fixed(program: Path, folder: Path) -> Path:
    """Writes the fixed program into the folder, as `fixed/lr_zero/mlp.py` for `broken/lr_zero/mlp.py`, and links the data it may read."""
    parts = program.relative_to(PROGRAMS).parts
    copy = folder.joinpath(*("fixed" if part == "broken" else part for part in parts))
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        (folder / "data").symlink_to(PROGRAMS / "data", target_is_directory=True)
    try:
        copy.write_text(apply_patch(program.read_text(encoding="utf-8"), fix_of(program).read_text(encoding="utf-8")), encoding="utf-8")
    except PatchError as error:
        raise PatchError(f"{fix_of(program)}: {error}") from None
    return copy


def apply_patch(text: str, patch: str) -> str:
    """The text after a unified diff. Each line of context and each removed line must be where the patch says it is."""
    old = text.split("\n")  # not splitlines: a form feed does not end a line
    new: list[str] = []
    position = 0
    headers, *rest = re.split(r"^(?=@@ )", patch.removesuffix("\n"), flags=re.MULTILINE)
    if not re.fullmatch(r"--- .*\n\+\+\+ .*\n", headers) or not rest:
        raise PatchError("this is no unified diff of one file")
    for hunk in rest:
        header, *lines = hunk.removesuffix("\n").split("\n")
        match = _HUNK.match(header)
        if match is None:
            raise PatchError(f"{header!r} is no header of a hunk")
        start, num_old, _, num_new = (1 if number is None else int(number) for number in match.groups())
        before, after = ([line[1:] for line in lines if line[:1] in (" ", sign)] for sign in "-+")
        if any(line[:1] not in (" ", "-", "+") for line in lines) or (len(before), len(after)) != (num_old, num_new):
            raise PatchError(f"the hunk {header!r} does not have the lines that its header counts")
        begin = start - 1 if num_old else start  # an insertion follows the line that it names
        if begin < position or old[begin : begin + num_old] != before:
            raise PatchError(f"the program does not have these lines at line {start}:\n" + "\n".join(before))
        new += old[position:begin] + after
        position = begin + num_old
    return "\n".join(new + old[position:])
