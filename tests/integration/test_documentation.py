"""Documentation cannot drift: blocks marked runnable are run, and the output that they show is the output that comes.

A block is marked by a comment on the line above it:
    <!-- runnable -->            it is executed and must succeed; `exit=1` names another exit code
    <!-- runnable output -->     moreover it prints what the block shows, but for numbers, curves and names of runs
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import fork_server
from sonde.rules.registry import RULES

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


def blocks() -> list[Block]:
    found = []
    for paper in PAPERS:
        text = paper.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            exit_code = re.search(r"exit=(\d+)", match["marks"])
            line = text.count("\n", 0, match.start()) + 1
            found.append(
                Block(
                    str(paper.relative_to(ROOT)),
                    line,
                    match["language"],
                    match["code"],
                    int(exit_code[1]) if exit_code else 0,
                    "output" in match["marks"],
                )
            )
    return found


def in_general(text: str) -> list[str]:
    """The words of an output without what differs each time: numbers, curves, names of runs, where lines are wrapped.

    What follows from a cause, which rules could tell, and how the cost is said depend on how many steps the machine had time to observe.
    """
    text = re.sub(r"^  └─.*?(?=^\s*$)|^rules .*?(?=^run )", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\d{4}-\d\d-\d\d_\S+", "RUN", text)
    text = re.sub(r"[▁▂▃▄▅▆▇█✗↑↓]+", "CURVE", text)
    text = re.sub(r"-?\d[\d,.]*(e[+-]?\d+)?|NaN|Inf(inity)?", "0", text)
    return text.split()


def test_the_readme_has_a_block_that_is_run_and_compared():
    assert any(block.paper == "README.md" and block.shows_output for block in blocks())


def test_the_readme_does_not_promise_more_rules_than_there_are():
    (promised,) = re.findall(r"More than (\d+) defects", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(promised) < len(RULES)


def test_the_readme_has_the_goals_that_the_benchmarks_judge():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- costs: from")[1].split("<!-- costs: end")[0]
    goals = [tuple(re.findall(r"\(goal (\d\.\d\d)\)", row)) for row in table.splitlines() if "(goal" in row]
    workloads = (ROOT / "benchmarks" / "workloads.py").read_text(encoding="utf-8")
    assert goals == re.findall(r"    Workload\(.*, (\d\.\d\d), (\d\.\d\d), \d\.\d\d\),", workloads)
    assert len(goals) == 3


def test_the_extra_all_brings_every_extra_that_is_not_a_framework():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    frameworks, tools = {"lightning", "transformers", "accelerate"}, {"bench", "dev"}
    (everything,) = extras["all"]
    assert set(everything.removeprefix("sonde[").removesuffix("]").split(",")) == set(extras) - frameworks - tools - {"all"}


@pytest.mark.torch
@pytest.mark.parametrize("block", blocks(), ids=str)
def test_a_runnable_block_does_what_it_says(block, tmp_path):
    pytest.importorskip("torch")
    for program in (ROOT / "src/sonde/cli/demo_programs").glob("*.py"):
        shutil.copy(program, tmp_path)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "PYTHONUTF8": "1",
        "PYTHONWARNINGS": "error",
    }
    if block.language == "python":
        child = fork_server.python("-c", block.code, cwd=tmp_path, env=environment)
        assert child.returncode == block.exit_code, child.stdout + child.stderr
        return
    rows = block.code.splitlines()
    command = ["bash", "-c", "\n".join(row.removeprefix("$ ") for row in rows if row.startswith("$ "))]
    shown = "\n".join(row for row in rows if not row.startswith("$ "))
    child = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert child.returncode == block.exit_code, child.stdout
    if block.shows_output:
        assert in_general(child.stdout) == in_general(shown)
