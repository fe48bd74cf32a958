"""Writes the sample screens of README.md and docs/ again, from real runs.

    make screens

Every block below `<!-- runnable output -->` is run, and what it prints replaces what the block shows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from runnable_blocks import blocks, copy_programs, run_commands  # noqa: E402


def main() -> None:
    for block in [each for each in blocks() if each.shows_output]:
        with tempfile.TemporaryDirectory() as directory:
            copy_programs(Path(directory))
            child = run_commands(block, Path(directory))
        if child.returncode != block.exit_code:
            sys.exit(f"{block} exits with {child.returncode}, not {block.exit_code}:\n{child.stdout}")
        paper = ROOT / block.paper
        screen = "\n".join([*block.commands, *(row.rstrip() for row in child.stdout.splitlines())]) + "\n"
        paper.write_text(paper.read_text(encoding="utf-8").replace(block.code, screen), encoding="utf-8")
        sys.stdout.write(f"{block}\n")


if __name__ == "__main__":
    main()
