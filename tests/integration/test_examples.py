"""Every example runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

import fork_server

pytest.importorskip("torch")

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.torch
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_has_something_to_say(example: Path, tmp_path: Path) -> None:
    done = fork_server.python(example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr.strip()
