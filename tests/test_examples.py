"""Every example runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

import warm

pytest.importorskip("torch")

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.torch
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_has_something_to_say(example: Path, tmp_path: Path) -> None:
    done = warm.python(example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr.strip()
