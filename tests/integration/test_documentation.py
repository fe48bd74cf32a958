"""Documentation cannot drift: blocks marked runnable are run, and the output that they show is the output that comes."""

import re
import tomllib

import pytest

import fork_server
from runnable_blocks import ROOT, blocks, copy_programs, environment, run_commands
from sonde.rules.registry import RULES


def in_general(text: str) -> list[str]:
    """The words of an output without what differs each time: numbers, curves, names of runs, where lines are wrapped.

    Consequences, the list of rules and the cost depend on how many steps the machine had time to observe. A message of Sonde during the
    training comes from a child process, before or after the next line of the script: such lines are compared first.
    """
    rows = [row for row in text.splitlines(keepends=True) if not row.startswith("sonde: still ")]  # a search that takes long
    text = "".join(sorted(rows, key=lambda row: not row.startswith("sonde: ")))
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
    copy_programs(tmp_path)
    if block.language == "python":
        child = fork_server.python("-c", block.code, cwd=tmp_path, env=environment())
        assert child.returncode == block.exit_code, child.stdout + child.stderr
        return
    child = run_commands(block, tmp_path)
    assert child.returncode == block.exit_code, child.stdout
    if block.shows_output:
        assert in_general(child.stdout) == in_general(block.output)
