"""The blocks of the documentation that can be run: found by the comment on the line above them, and run in a directory of their own.

    <!-- runnable -->            it is executed and must succeed; `exit=1` names another exit code
    <!-- runnable output -->     moreover it prints what the block shows, but for numbers, curves and names of runs
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- runnable(?P<marks>[^>]*?)-->\n```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)


class Block(NamedTuple):
    paper: str
    line: int
    language: str
    code: str
    exit_code: int
    shows_output: bool

    def __str__(self) -> str:
        return f"{self.paper}:{self.line}"

    @property
    def commands(self) -> list[str]:
        return [row for row in self.code.splitlines() if row.startswith("$ ")]

    @property
    def output(self) -> str:
        return "\n".join(row for row in self.code.splitlines() if not row.startswith("$ "))


def blocks() -> list[Block]:
    found = []
    for paper in PAPERS:
        text = paper.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            exit_code = re.search(r"exit=(\d+)", match["marks"])
            line = text.count("\n", 0, match.start()) + 1
            name, code = str(paper.relative_to(ROOT)), int(exit_code[1]) if exit_code else 0
            found.append(Block(name, line, match["language"], match["code"], code, "output" in match["marks"]))
    return found


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "COLUMNS": "100", "PYTHONUTF8": "1", "PYTHONWARNINGS": "error"}


def copy_programs(directory: Path) -> None:
    """The scripts that the blocks name."""
    for program in (ROOT / "src/sonde/cli/demo_programs").glob("*.py"):
        shutil.copy(program, directory)


def run_commands(block: Block, directory: Path) -> subprocess.CompletedProcess[str]:
    """The commands of a console block, with stdout and stderr together."""
    commands = "\n".join(row.removeprefix("$ ") for row in block.commands)
    return subprocess.run(
        ["bash", "-c", commands],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
