"""Tensors that are moved without need: what the rules find in the recorded transfers, what they leave alone, when they cannot tell."""

from __future__ import annotations

from typing import Any

import pytest

from sonde.events import Event, Severity, Step
from sonde.rules.devices.silent_transfer import RULE as silent_transfer
from sonde.rules.devices.tensor_left_behind import RULE as tensor_left_behind
from sonde.rules.rule import Clear
from synthetic_steps import ask, the_finding, why_not


def row(line: str = "train.py:14", **given: Any) -> dict[str, Any]:
    """A batch that goes over, as it should."""
    return {
        "line": line, "text": "x = x.to(device)", "call": ".to()", "origin": "cpu", "target": "cuda:0", "num": 1, "num_bytes": 4_194_304,
        "ms": 1.0, "what": "float32 [1024, 1024]", "what_bytes": 4_194_304, "num_same": 0, "num_again": 0, "num_back": 0,
        "num_pageable": 0, "left_at": "", "held_as": [],
    } | given  # fmt: skip


def looked_at(*looks: list[dict[str, Any]], step_ms: float = 40.0) -> list[Step]:
    """Pairs of steps that were looked at, with what the second of each moved."""
    scalars = {"step_ms": step_ms + 1.0, "sonde_ms": 1.0}
    steps = []
    for number, rows in enumerate(looks):
        steps.append(Step(20 * number, 0, scalars, {}, (Event("xray", 20 * number, {"num_transfers": len(rows)}),), {}))
        steps.append(Step(20 * number + 1, 0, scalars, {}, (Event("transfers", 20 * number + 1, {"transfers": rows}),), {}))
    return steps


def optimizer(device: str) -> Step:
    return Step(0, 0, {}, {}, (Event("optimizer", 0, {"groups": [{"device": device}]}),), {})


SAME = row("train.py:16", text="w = w.to(device)", num_same=1, ms=2.0)


def test_a_tensor_that_is_brought_over_in_every_step_is_said_with_its_size_and_time():
    finding = the_finding(silent_transfer, looked_at([row(), SAME], [row(), SAME]))
    assert finding.severity is Severity.INFO
    assert finding.cause == (
        "train.py:16 moves the same tensor (float32 [1024, 1024], 4 MiB) from the CPU to cuda:0 in every step, and nothing in it "
        "has changed; that takes 2 ms, 5 % of the step"
    )
    assert finding.step == 1
    assert finding.evidence["source_text"] == "w = w.to(device)"


def test_it_is_a_warning_where_it_takes_a_tenth_of_the_step():
    slow = {**SAME, "ms": 4.0}
    assert the_finding(silent_transfer, looked_at([slow], [slow])).severity is Severity.WARNING


def test_where_no_times_were_taken_it_is_only_mentioned():
    finding = the_finding(silent_transfer, looked_at([SAME], [SAME], step_ms=float("nan")))
    assert finding.severity is Severity.INFO
    assert finding.cause.endswith("has changed")


def test_several_lines_are_counted_together_and_the_longest_is_named():
    other = {**SAME, "line": "train.py:17", "num_same": 3, "ms": 3.0}
    finding = the_finding(silent_transfer, looked_at([SAME, other], [SAME, other]))
    assert finding.cause.startswith("train.py:17 moves the same 3 tensors (the largest float32")
    assert finding.cause.endswith("in them has changed, and 1 other line does so too; that takes 5 ms, 12 % of the step")


def test_what_comes_again_within_a_step_is_not_said_a_second_time_of_what_comes_in_every_step():
    both, again = row(num_same=1, num_again=11), row(num_again=11)
    assert the_finding(silent_transfer, looked_at([both], [both])).evidence["kind"] == "same"
    finding = the_finding(silent_transfer, looked_at([again], [again]))
    assert "that is there already, unchanged, 11 times in every step" in finding.cause


@pytest.mark.parametrize(("left_at", "who"), [("train.py:9", "train.py:9"), ("", "another line")], ids=["known", "unknown"])
def test_what_goes_to_the_cpu_and_back_is_said_with_both_lines(left_at, who):
    back = row(num_back=1, left_at=left_at)
    cause = the_finding(silent_transfer, looked_at([back], [back])).cause
    assert cause.startswith(f"train.py:14 moves back to cuda:0, in every step, what {who} moves from there to the CPU (float32")


def test_memory_that_is_not_pinned_is_only_mentioned_however_long_it_takes():
    slow = row(num_pageable=1, ms=30.0)
    finding = the_finding(silent_transfer, looked_at([slow], [slow]))
    assert finding.severity is Severity.INFO
    assert "pin_memory=True" in finding.fix


def test_a_small_batch_need_not_be_pinned():
    small = row(num_pageable=1, what_bytes=65536)
    assert ask(silent_transfer, looked_at([small], [small])) == Clear()


@pytest.mark.parametrize("rows", [[], [row()], [row(num=8, origin="cuda:0", target="cpu")]], ids=["none", "batch", "numbers"])
def test_what_has_to_be_moved_is_clear(rows):
    assert ask(silent_transfer, looked_at(rows, rows, rows)) == Clear()


def test_what_happens_once_in_a_while_is_clear():
    assert ask(silent_transfer, looked_at([SAME], [row()], [row()], [row()], [SAME], [row()])) == Clear()


def test_a_tensor_that_a_model_holds_is_left_to_the_rule_for_those():
    held = row(held_as=["mask"], text="x * mask_of(self).to(x.device)")
    steps = looked_at([held], [held])
    left = [{"kind": "attribute", "path": "mask", "num_elements": 64, "model_on": "cuda"}]
    assert ask(silent_transfer, steps) == Clear()
    finding = the_finding(tensor_left_behind, [Step(0, 0, {}, {}, (Event("membership", 0, {"left_behind": left}),), {}), *steps])
    assert (finding.severity, finding.evidence["source"]) == (Severity.WARNING, "train.py:14")


def test_a_step_that_moves_nothing_is_clear():
    assert ask(silent_transfer, [optimizer("cuda"), *looked_at([])]) == Clear()


def test_a_training_on_the_cpu_is_clear_without_a_look():
    assert ask(silent_transfer, [optimizer("cpu")]) == Clear()


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([], "no complete step was recorded"),
        ([optimizer("cuda")], "no step was profiled"),
        ([Step(9, 0, {}, {}, (Event("xray", 9, {"lines": []}),), {})], "no step was profiled"),
        (looked_at([SAME]), "the transfers of fewer than 2 pairs of steps were recorded"),
    ],
    ids=["nothing", "no profile", "an older version", "one pair"],
)  # fmt: skip
def test_too_few_recorded_steps_are_not_judged(steps, reason):
    assert why_not(silent_transfer, steps) == reason


def test_damaged_rows_are_no_reason_to_fail():
    odd: list[Any] = [{}, {"num_same": "x"}, {"line": None, "num_again": None, "held_as": 7}]
    assert ask(silent_transfer, looked_at(odd, odd)) == Clear()
    assert ask(tensor_left_behind, [Step(0, 0, {}, {}, (Event("membership", 0, {}),), {}), *looked_at(odd, odd)]) == Clear()


def test_an_event_with_a_row_of_another_type_does_not_count():
    odd: list[Any] = [3, SAME]
    assert "fewer than 2 pairs" in why_not(silent_transfer, looked_at(odd, odd))


def test_of_many_recorded_steps_the_first_one_is_named():
    assert the_finding(silent_transfer, looked_at(*[[SAME]] * 100)).step == 1


def left_behind(kind: str, *, text: str = "x = x.to(device)") -> list[Step]:
    """A model on a device with a tensor on the CPU, and a line of the training that moves something."""
    left = [{"kind": kind, "path": "encoder.mask", "num_elements": 64, "model_on": "cuda"}]
    events = (Event("membership", 3, {"left_behind": left}), Event("source", 3, {"call": "transfer", "line": "train.py:8", "text": text}))
    return [Step(3, 0, {"loss": 1.0}, {}, events, {})]


def test_an_attribute_whose_name_is_in_a_line_that_moves_it_is_a_warning():
    finding = the_finding(tensor_left_behind, left_behind("attribute", text="return x * self.mask[:, :n].to(x.device)"))
    assert (finding.severity, finding.where, finding.step) == (Severity.WARNING, "encoder.mask", 3)
    assert finding.evidence["source"] == "train.py:8"


@pytest.mark.parametrize(
    ("kind", "text"),
    [("attribute", "x = x.to(device)"), ("buffer", "y = self.mask.to(device)"), ("attribute", "self.mask = other.to(device)")],
    ids=["not moved", "offloaded", "assigned"],
)
def test_a_tensor_that_no_line_moves_again_is_only_mentioned(kind, text):
    finding = the_finding(tensor_left_behind, left_behind(kind, text=text))
    assert finding.severity is Severity.INFO
    assert "source" not in finding.evidence


def test_what_was_left_behind_and_moved_later_is_clear():
    later = Step(4, 0, {"loss": 1.0}, {}, (Event("membership", 4, {"left_behind": []}),), {})
    assert ask(tensor_left_behind, [*left_behind("attribute"), later]) == Clear()
