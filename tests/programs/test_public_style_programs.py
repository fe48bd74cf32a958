"""Programs in the style of public examples: watched, each prints, writes and draws what it does alone, and none gets an alarm.

The last lines of each program show the states of the three random generators, once more in an atexit handler: they are part of its output.
"""

from __future__ import annotations

import os
import subprocess
from difflib import unified_diff
from pathlib import Path

import pytest

pytest.importorskip("torch")

import fork_server
from sonde.events import Severity
from sonde.report import diagnose

FOLDER = Path(__file__).parent / "public_style"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
CADENCES = {"default": (), "every step": ("--every", "1")}
NO_ALARM = ("healthy", "nothing_found")

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_in_public_style_does_the_same_when_watched_and_gets_no_alarm(program, tmp_path):
    alone, files = _run(FOLDER / program, cwd=tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    assert files, "a program that writes no file cannot show that its files stay the same"
    differences, alarms = [], []
    for cadence, options in CADENCES.items():
        run = tmp_path / f"run, {cadence}"
        watched, files_watched = _run("-m", "sonde", "run", "--to", run, *options, FOLDER / program, cwd=tmp_path / cadence)
        report = diagnose(run)
        if watched.returncode != alone.returncode:
            differences.append(f"{cadence}: exit code {watched.returncode}\n{watched.stderr}")
        if watched.stdout != alone.stdout:
            differences.append(f"{cadence}: output\n" + _changes(alone.stdout, watched.stdout))
        # Sonde prints its verdict to stderr, after what the script printed there.
        if not watched.stderr.startswith(alone.stderr) or "steps of" not in watched.stderr.removeprefix(alone.stderr):
            differences.append(f"{cadence}: stderr\n" + _changes(alone.stderr, watched.stderr))
        differences += [f"{cadence}: {name}" for name in files | files_watched if files.get(name) != files_watched.get(name)]
        if report.verdict not in NO_ALARM or any(finding.severity.rank >= Severity.WARNING.rank for finding in report.findings):
            alarms.append(f"{cadence}: {report.summary()}")
    assert not differences, "\n".join(differences)
    assert not alarms, "\n".join(alarms)


def _run(*command: str | Path, cwd: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, bytes]]:
    """How the process ended, and the files that it wrote into a new directory."""
    cwd.mkdir()
    done = fork_server.python(*command, cwd=cwd, env=os.environ | fork_server.SHELL)
    return done, {path.relative_to(cwd).as_posix(): path.read_bytes() for path in cwd.rglob("*") if path.is_file()}


def _changes(alone: str, watched: str) -> str:
    return "\n".join(unified_diff(alone.splitlines(), watched.splitlines(), "alone", "watched", lineterm="", n=0))
