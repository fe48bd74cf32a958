"""`sonde tune`: what it takes, what it refuses, what it prints."""

import json

import pytest
from click.testing import CliRunner

from sonde.cli import main
from sonde.cli.tune import tune
from sonde.errors import SondeError
from sonde.tuning.proposals import FAMILIES

TRAINING = """
import sys
import torch
assert sys.argv[1:] == ["--lr", "0.1"]
print("lots of output")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(40):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    return "train.py"


def test_a_dry_run_lists_what_would_be_tried_and_runs_nothing(script, tmp_path):
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    done = CliRunner().invoke(tune, ["--dry-run", script])
    assert done.exit_code == 0
    assert all(f"  {family} " in done.output for family in FAMILIES)
    assert not (tmp_path / "started").exists()


def test_a_dry_run_of_some_lists_those(script):
    done = CliRunner().invoke(tune, ["--dry-run", "--only", "threads, workers", script])
    assert "threads" in done.output
    assert "compile" not in done.output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--only", "worker", "train.py"], "Nearest: workers"),
        (["--dry-run", "trian.py"], "Nearest: train.py"),
        (["--dry-run", "."], "is a directory"),
    ],
    ids=["unknown change", "no such script", "a directory"],
)
def test_a_mistake_is_answered_by_a_letter(script, given, words):
    done = CliRunner().invoke(tune, given)
    assert isinstance(done.exception, SondeError)
    assert words in str(done.exception)


@pytest.mark.parametrize("given", [["--steps", "2"], ["--repeats", "0"], ["--time-limit", "nonsense"], ["--steps", "x"]], ids=" ".join)
def test_a_number_that_cannot_be_meant_is_refused_with_exit_code_2(script, given, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["tune", *given, script])
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith("sonde: ")


@pytest.mark.torch
def test_the_scripts_arguments_are_its_own_and_its_output_is_kept_out_of_the_way(script):
    pytest.importorskip("torch")
    done = CliRunner().invoke(tune, ["--only", "optimizer", "--steps", "5", "--repeats", "1", "--json", script, "--lr", "0.1"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["args"] == ["--lr", "0.1"]
    assert {each["name"] for each in document["results"]} == {"foreach", "fused"}
    assert "lots of output" not in done.output
    assert document["results"][0]["changes"][0]["line"] == "train.py:7"
