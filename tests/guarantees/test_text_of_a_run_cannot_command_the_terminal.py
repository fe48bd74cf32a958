"""R71: nothing that comes out of a run, a file name or an argument can command the terminal that shows it."""

import os
import pty
import re
import select
import subprocess
import sys
import unicodedata

import pytest

from sonde.events import Event

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202ecod\u2066\r\x08\ud800"
BRACKETS = "[bold red]layer[/bold red][/] :boom:"  # what rich would take for markup
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # the one thing that Sonde itself sends beside text


def on_a_terminal(tmp_path, *arguments, **variables):
    """What a command sends to a terminal, as text, and its exit code."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "PYTHONUTF8": "1"}
    environment.pop("NO_COLOR", None)
    environment |= variables
    command = [sys.executable, "-m", "sonde", *(os.fsencode(argument) for argument in arguments)]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    sent = b""
    while True:
        select.select([ours], [], [])
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        sent += piece
    os.close(ours)
    return sent.decode("utf-8"), child.wait()


def commands_in(text):
    """Characters that a terminal would obey, after what Sonde itself may send: colours and line ends."""
    rest = COLOUR.sub("", text).replace("\r\n", "")
    return [char for char in rest if unicodedata.category(char) in {"Cc", "Cf", "Cs"}]


def hostile_run(sample_run):
    source = {"call": "optimizer_step", "line": f"{EVIL}.py:1", "text": EVIL + BRACKETS, "optimizer": 0}
    unowned = {"num_unowned": 1, "unowned": [f"{EVIL}.weight"], "optimizers": []}
    return sample_run(
        "evil",
        [2.0 * 1.2**i for i in range(60)],
        scalars={"zero_grads": 0, "stale_updates": 1},
        layers=(EVIL, BRACKETS),
        events=[
            Event("source", 0, source),
            Event("membership", 0, unowned),
            Event("unobserved", 0, {"where": EVIL, "reason": EVIL}),
            Event("retired", 0, {"probe": EVIL, "where": BRACKETS, "error": EVIL}),
        ],
        ending={"how": "exception", "exit_code": 1, "exception": f"ValueError: {EVIL}"},
        bad_layer=EVIL,
    )


def test_r71_a_verdict_full_of_hostile_names_sends_no_commands(sample_run, tmp_path):
    path = hostile_run(sample_run)
    sent, code = on_a_terminal(tmp_path, "diagnose", str(path))
    assert code == 1
    assert COLOUR.search(sent)  # it was drawn for a terminal
    assert "\\x1b]0;owned\\x07" in sent  # and the names are there, written out
    assert commands_in(sent) == []


def test_r71_markup_in_names_is_text(sample_run, tmp_path):
    sent, _ = on_a_terminal(tmp_path, "diagnose", str(hostile_run(sample_run)))
    plain = " ".join(COLOUR.sub("", sent).split())
    assert BRACKETS in plain


@pytest.mark.parametrize(
    "arguments",
    [
        ["{evil}"],
        ["diagnose", "{evil}"],
        ["diagnose", "--{evil}"],
        ["explain", "{evil}"],
        ["run", "{evil}.py"],
        ["run", "--every", "{evil}", "train.py"],
        ["report", "-o", "{evil}"],
        ["runs", "{evil}"],
        ["compact", "{evil}"],
    ],
)
def test_r71_an_error_about_a_hostile_argument_sends_no_commands(tmp_path, arguments):
    evil = EVIL.replace("\ud800", "\udcff")  # what an argument that is not UTF-8 looks like
    sent, code = on_a_terminal(tmp_path, *(argument.replace("{evil}", evil) for argument in arguments))
    assert code == 2
    assert "owned" in sent
    assert commands_in(sent) == []
    assert "Traceback" not in sent


def test_r71_a_hostile_file_name_is_suggested_without_commands(tmp_path):
    (tmp_path / "train\x1b[31m.py").touch()
    sent, _ = on_a_terminal(tmp_path, "run", "train.py")
    assert "train\\x1b[31m.py" in sent
    assert commands_in(sent) == []


def test_r71_a_hostile_name_of_a_report_is_shown_without_commands(broken_run, tmp_path):
    sent, code = on_a_terminal(tmp_path, "report", "-o", "evil\x1b[2J.md")
    assert code == 0
    assert "evil\\x1b[2J.md" in sent
    assert commands_in(sent) == []
    assert (tmp_path / "evil\x1b[2J.md").exists()


def test_r71_a_list_of_runs_with_hostile_names_sends_no_commands(sample_run, tmp_path):
    hostile_run(sample_run).rename(tmp_path / "runs" / "evil\x1b[2J\u202e")
    sent, code = on_a_terminal(tmp_path, "runs")
    assert code == 0
    assert "evil\\x1b[2J\\u202e" in sent
    assert commands_in(sent) == []


@pytest.mark.parametrize("arguments", [["diagnose"], ["diagnose", "--json"], ["explain"], ["--help"], ["runs"]])
def test_r71_a_reader_that_leaves_early_is_no_error(broken_run, tmp_path, arguments):
    read, write = os.pipe()
    os.close(read)  # a pipe that nobody reads: every write fails at once
    environment = os.environ | {"PYTHONUTF8": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "sonde", *arguments],
        cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert child.stderr == ""
    assert child.returncode == 141


@pytest.mark.parametrize("locale", [{"LANG": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
@pytest.mark.parametrize("arguments", [["diagnose"], ["explain"], ["--help"], ["runs"]])
def test_r71_a_locale_without_unicode_is_no_error(broken_run, sonde, locale, arguments):
    child = sonde(*arguments, **({"PYTHONUTF8": "0"} | locale))
    assert child.returncode in (0, 1)
    assert child.stdout
    assert child.stderr == ""
    assert "Traceback" not in child.stdout


def test_r71_in_an_ascii_locale_the_verdict_is_drawn_with_ascii(broken_run, sonde):
    child = sonde("diagnose", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert child.stdout.isascii()
    assert "\\u" not in child.stdout


def test_r71_no_color_means_no_colour(broken_run, tmp_path):
    sent, _ = on_a_terminal(tmp_path, "diagnose", NO_COLOR="1")
    assert "missing-zero-grad" in sent
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]", sent)
