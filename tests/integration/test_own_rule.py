"""A rule that another package provides by an entry point: the package in examples/own_rule, as docs/guide/own-rules.md shows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sonde
from synthetic_steps import training, write_log

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "own_rule"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with the package as an installer leaves it: the module, and its metadata with the entry point."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
    metadata = tmp_path / "site" / "team_rules-1.0.dist-info"
    metadata.mkdir(parents=True)
    name, version = project["project"]["name"], project["project"]["version"]
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    ((group, entries),) = project["project"]["entry-points"].items()
    rows = [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(rows), encoding="utf-8")
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(PACKAGE / f"{module}.py", tmp_path / "site")
    return tmp_path / "site"


def run(site: Path | None, *command: str | Path) -> subprocess.CompletedProcess[str]:
    paths = [str(site)] if site else []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(Path(sonde.__file__).parents[1])]), "PYTHONUTF8": "1"}
    return subprocess.run([sys.executable, "-m", "sonde", *map(str, command)], env=env, capture_output=True, text=True, check=False)


def log_with(tmp_path: Path, clips: int, num_steps: int = 60) -> Path:
    path = tmp_path / "rank0-hand-001.sonde"
    write_log(path, training(num_steps, scalars=lambda step: {"clips": clips if step >= 5 else 1}))
    return path


def test_a_rule_of_an_installed_package_finds_its_defect(site, tmp_path):
    done = run(site, "diagnose", log_with(tmp_path, clips=0), "--json")
    (finding,) = [each for each in json.loads(done.stdout)["findings"] if each["rule"] == "unclipped-gradients"]
    assert (finding["severity"], finding["step"], done.returncode) == ("warning", 5, 1), done.stderr
    assert finding["cause"] == "55 of 60 updates at train.py:21 used gradients that were not clipped"


@pytest.mark.parametrize(("num_steps", "is_evaluated"), [(60, True), (8, False)])
def test_it_is_clear_where_gradients_are_clipped_and_not_evaluated_in_a_short_run(site, tmp_path, num_steps, is_evaluated):
    report = json.loads(run(site, "diagnose", log_with(tmp_path, clips=1, num_steps=num_steps), "--json").stdout)
    assert "unclipped-gradients" not in [each["rule"] for each in report["findings"]]
    assert ("unclipped-gradients" in [each["rule"] for each in report["not_evaluated"]]) != is_evaluated


def test_its_page_is_explained_only_where_it_is_installed(site):
    assert "clip_grad_norm_(model.parameters(), 1.0)" in run(site, "explain", "unclipped-gradients").stdout
    assert "there is no rule" in run(None, "explain", "unclipped-gradients").stderr


@pytest.mark.parametrize("file", ["team_rules.py", "pyproject.toml"])
def test_the_guide_shows_the_package_as_it_is(file):
    assert (PACKAGE / file).read_text(encoding="utf-8") in (ROOT / "docs" / "guide" / "own-rules.md").read_text(encoding="utf-8")
