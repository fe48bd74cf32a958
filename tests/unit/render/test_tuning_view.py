"""What `sonde tune` draws: what to change, what was tried, and nothing that could be mistaken for a gain."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sonde.formatting import strict_json
from sonde.render.terminal.print_to_terminal import Terminal
from sonde.render.terminal.tuning_terminal import TerminalTuning, TuningPlan
from sonde.tuning.measured_gain import Gain, LossCheck
from sonde.tuning.proposals import Patch, Proposal
from sonde.tuning.trial_messages import CallSite
from sonde.tuning.tuning_result import BaselineSpeed, MeasuredChange, Tuning

AT = CallSite("/x/train.py:7", "train.py:7", "loader = DataLoader(data, 8)")
WORKERS = Proposal("workers", "workers=2", "DataLoader(…, num_workers=2)", AT, Patch())
FUSED = Proposal("optimizer", "fused", "Adam(…, fused=True)", CallSite("/x/train.py:9", "train.py:9", "opt = Adam(p)"), Patch())
BATCH = Proposal("batch", "batch_size=16", "DataLoader(…, batch_size=16)", AT, Patch(), same_training=False)
COMPILE = Proposal("compile", "compile", "model.compile()", AT, Patch(), slow_start=True)
FASTER = Gain(2.0, 1.9, 2.1, 3, "faster")
SAME = LossCheck("same", num_steps=20)
BASE = BaselineSpeed(30.0, 33.3, 266.0, 0.61, 20, 7, 0.012, 0.0)
TUNING = Tuning(
    script="train.py", args=(), baseline=BASE, results=(MeasuredChange((WORKERS,), FASTER, SAME, 15.0),), together=(),
    not_applicable={}, untried=(),
    stopped="", num_trials=9, elapsed_s=31.0, load_per_core=0.0, folder=Path("/tmp/sonde-tune-1"),
)  # fmt: skip


def drawn(what, width=80):
    file = io.StringIO()
    terminal = Terminal(file)
    terminal.width = width
    terminal.print(what)
    return file.getvalue()


def test_the_change_to_make_is_said_with_its_line_and_the_measured_gain():
    text = drawn(TerminalTuning(TUNING))
    assert "2.00 times as fast, measured: 30.0 ms per step become 15.0." in text
    assert "train.py:7" in text
    assert "loader = DataLoader(data, 8)" in text
    assert "loss the same bit for bit" in text


def test_large_numbers_are_written_as_people_write_them():
    text = drawn(TerminalTuning(replace(TUNING, baseline=replace(BASE, step_ms=1234.5, samples_per_s=4130.4))))
    assert "1,234 ms per step, 4,130 samples/s" in text


@pytest.mark.parametrize(
    ("stopped", "words"),
    [("time", ("There was time to run the unchanged script", "for everything try --time-limit 120")), ("interrupted", ("You stopped it",))],
    ids=["time", "interrupted"],
)
def test_what_was_cut_before_anything_was_measured_says_so(stopped, words):
    cut = replace(TUNING, results=(), untried=("a", "b", "c"), stopped=stopped, num_trials=1, elapsed_s=10.0)
    text = " ".join(drawn(TerminalTuning(cut)).split())
    assert "cut short" in text
    assert all(each in text for each in words)
    assert "Nothing that was tried" not in text


def test_the_noise_is_said():
    assert "differ by 1.2 %" in drawn(TerminalTuning(TUNING))


def test_a_combination_is_shown_as_it_was_measured():
    together = MeasuredChange((WORKERS, FUSED), Gain(2.6, 2.5, 2.7, 3, "faster"), SAME, 11.5)
    text = drawn(TerminalTuning(replace(TUNING, together=(together,))))
    assert "2.60 times as fast" in text
    assert "DataLoader(…, num_workers=2) + Adam(…, fused=True)" in text


def test_a_combination_that_is_worse_than_one_of_its_parts_is_not_recommended():
    together = MeasuredChange((WORKERS, FUSED), Gain(1.5, 1.4, 1.6, 3, "faster"), SAME)
    assert replace(TUNING, together=(together,)).recommended.name == "workers=2"


def test_of_two_that_help_the_surer_one_is_recommended():
    lucky = MeasuredChange((WORKERS,), Gain(2.2, 1.2, 2.4, 3, "faster"), SAME)
    sure = MeasuredChange((WORKERS, FUSED), Gain(1.9, 1.8, 2.0, 3, "faster"), SAME)
    assert replace(TUNING, results=(lucky,), together=(sure,)).recommended is sure


def test_a_faster_training_that_is_not_the_same_is_never_recommended():
    departs = MeasuredChange((FUSED,), FASTER, LossCheck("departs", 0.31, 4, 20))
    other = MeasuredChange((BATCH,), FASTER, LossCheck("unknown"))
    tuning = replace(TUNING, results=(departs, other))
    text = drawn(TerminalTuning(tuning), width=100)
    assert tuning.recommended is None
    assert "THE LOSS DEPARTS from step 4 on, by up to 31.0 %" in text
    assert "by samples per second; another training" in text
    assert "Nothing that was tried makes this training faster beyond the noise." in text


def test_noise_slowness_and_failure_are_told_apart():
    noise = MeasuredChange((FUSED,), Gain(1.02, 0.97, 1.1, 3, "noise"), SAME)
    slower = MeasuredChange((BATCH,), Gain(0.4, 0.4, 0.4, 1, "slower"), SAME)
    failed = MeasuredChange((COMPILE,), None, LossCheck("unknown"), error="InductorError: no compiler")
    text = drawn(TerminalTuning(replace(TUNING, results=(noise, slower, failed))))
    for words in ("within the noise, 0.97 to 1.10 in 3 runs", "slower, measured once", "failed", "InductorError: no compiler"):
        assert words in text


def test_what_compiling_costs_is_said_with_the_steps_that_pay_for_it():
    slow = MeasuredChange((COMPILE,), FASTER, LossCheck("close", 0.0001), start_s=34.2, pays_off_after=2280)
    assert "34.2 s to compile, paid back after 2,280 steps" in " ".join(drawn(TerminalTuning(replace(TUNING, results=(slow,)))).split())


def test_what_was_not_tried_has_its_reason():
    not_applicable = {"pin": "nothing is on an accelerator"}
    tuning = replace(TUNING, not_applicable=not_applicable, untried=("model.compile()",), stopped="time", load_per_core=2.0)
    text = drawn(TerminalTuning(tuning), width=100)
    for words in ("pin: nothing is on an accelerator", "model.compile()", "--time-limit", "busy"):
        assert words in text


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal(width):
    together = (MeasuredChange((WORKERS, FUSED), FASTER, SAME),)
    tuning = replace(TUNING, not_applicable={"pin": "nothing is on an accelerator"}, together=together)
    assert max(len(row) for row in drawn(TerminalTuning(tuning), width).splitlines()) <= width


def test_text_of_the_user_cannot_command_the_terminal():
    evil = replace(WORKERS, site=CallSite("k", "tr\x1b[31m.py:7", "x = '\x1b]0;owned\x07'"))
    text = drawn(TerminalTuning(replace(TUNING, results=(MeasuredChange((evil,), FASTER, SAME),))))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_the_document_for_programs_is_strict_json():
    results = (MeasuredChange((FUSED,), FASTER, LossCheck("departs", math.inf, 3, 20)), *TUNING.results)
    document = json.loads(strict_json(replace(TUNING, results=results).to_dict()), parse_constant=pytest.fail)
    assert document["schema"] == 1
    assert document["results"][0]["loss"]["difference"] == "Infinity"
    (change,) = document["recommended"]["changes"]
    assert change == {"family": "workers", "change": WORKERS.change, "line": "train.py:7", "text": AT.text, "note": ""}


def test_a_plan_names_everything_that_would_be_tried():
    text = drawn(TuningPlan("train.py", {"workers": "Batches made by other processes.", "compile": "The model compiled."}, 600))
    assert "workers" in text
    assert "for 600 s at most" in " ".join(text.split())
