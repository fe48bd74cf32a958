"""The group of commands: help, usage errors, exit codes."""

import os
import re
import subprocess
import sys

import pytest

from sonde.cli import COMMANDS


def test_help_lists_every_command_with_a_sentence(sonde):
    child = sonde("--help")
    assert child.returncode == 0
    assert not child.stderr
    for command in COMMANDS:
        assert re.search(rf"^  {command}\s+\w", child.stdout, re.MULTILINE)


def test_the_bare_command_shows_the_help(sonde):
    child = sonde()
    assert "sonde run train.py" in child.stdout + child.stderr
    assert child.returncode in (0, 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example(sonde, command):
    child = sonde(command, "--help")
    assert child.returncode == 0
    assert f"Example:  sonde {command}" in child.stdout


def test_the_version_is_said(sonde):
    assert re.fullmatch(r"sonde \d+\.\d+\.\d+\S*\n", sonde("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dignose"], "Nearest: diagnose"),
        (["diagnose", "--jsn"], "--jsn"),
        (["diagnose", "a", "b"], "unexpected extra argument"),
        (["run"], "Missing argument 'SCRIPT'"),
        (["run", "--every", "often", "x.py"], "'often' is not a valid integer"),
        (["report"], "Missing option '-o'"),
        (["explain", "missing-zero-grade"], "Nearest: missing-zero-grad"),
        (["explain", "42"], "All of them: sonde explain"),
        (["run", "train.py"], "no file train.py here"),
        (["run", "missing/train.py"], "no file train.py in missing"),
        (["run", "."], "is a directory"),
        (["run", "--", "--lr"], "Sonde's options come before the script"),
        (["run", "--every", "0", "x.py"], "every must be a whole number"),
        (["run", "--budget", "7", "x.py"], "between 0 and 1"),
        (["run", "--preset", "prodction", "x.py"], "Nearest: production"),
        (["run", "--switch", "memory", "x.py"], "Nearest: memory_usage"),
        (["run", "--layer", "(encoder", "x.py"], "layers: The regular expression"),
        (["run", "--mode", "none", "--switch", "memory-usage", "x.py"], "debug_memory_usage=True prints what is measured"),
        (["diagnose"], "No run here"),
        (["diagnose", "runs/base"], "No run runs/base"),
        (["report", "-o", "x.pdf"], ".html, .md, .json"),
        (["report", "-o", "x.html"], "No run here"),
        (["compact"], "No run here"),
    ],
)
def test_wrong_usage_gets_a_letter_and_exit_code_2(sonde, arguments, message):
    child = sonde(*arguments)
    assert child.returncode == 2
    assert child.stderr.startswith("sonde: ")
    assert message in child.stderr
    assert "Traceback" not in child.stderr
    assert not child.stdout


def test_without_a_command_the_help_is_shown_as_it_is(sonde):
    child = sonde()
    assert child.returncode == 2
    assert child.stderr.startswith("Usage: sonde ")


def test_a_file_that_is_nearly_named_is_suggested(sonde, tmp_path):
    (tmp_path / "train_model.py").touch()
    assert "Nearest: train_model.py" in sonde("run", "train_modle.py").stderr


def test_a_broken_settings_file_gets_a_letter(sonde, tmp_path):
    (tmp_path / "sonde.toml").write_text("every = ")
    child = sonde("diagnose")
    assert child.returncode == 2
    assert "sonde.toml is not valid TOML" in child.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
def test_a_full_disk_is_a_letter_and_no_traceback():
    with open("/dev/full", "wb") as full:
        child = subprocess.run([sys.executable, "-m", "sonde", "explain", "dead-relu"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (child.returncode, child.stderr.splitlines()[0]) == (2, "sonde: the output could not be written: No space left on device.")
    assert "Traceback" not in child.stderr
    assert "Exception ignored" not in child.stderr
