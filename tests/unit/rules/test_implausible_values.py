"""Damaged and malicious logs hold any number: a rule that meets one answers, and does not fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from sonde.events import EVENT_TYPES, Event, Step, UnreadableEvent, decode, event_fields
from sonde.rules.engine import evaluate
from sonde.rules.registry import RULES
from sonde.rules.rule import NotEvaluated
from synthetic_steps import healthy, spread_over_run, view_of

HUGE = 10**400  # no float holds it
NUMBERS = (inf, -inf, nan, HUGE, -HUGE, 10**100, -1, 0)
ROW_NAMES = (
    "optimizer", "num_owned", "num_foreign", "num_foreign_with_grad", "lr", "num_parameters", "num", "ms", "cores", "threads", "load",
    "num_bytes", "num_same", "num_again", "num_back", "what_bytes", "size", "others", "low", "high", "zeros", "nan", "inf", "num_classes",
    "num_distinct", "num_elements", "T_max", "total_steps", "multiplications", "elements", "forward_ms", "backward_ms", "cpu_share",
    "pushed_off_per_s",
)  # fmt: skip


def values(number: float) -> list[Any]:
    """What a field may hold, from the most to the least harmful: the first that its type accepts is taken."""
    row = dict.fromkeys(ROW_NAMES, number)
    return [number, [row], row, [number], ["x", number], [["x", number]], ["x"], "x", True, []]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:20])
def test_no_rule_fails_on_a_number_that_cannot_be_right(number):
    events = []
    for event_type in EVENT_TYPES:
        fields = event_fields(event_type)
        data = {each.key: next((value for value in values(number) if each.accepts(value)), None) for each in fields}
        events.append(Event(event_type.KIND, 30, data))
        events += [Event("source", 30, {**data, "call": call}) for call in ("loader", "clip", "backward") if event_type.KIND == "source"]
    assert not failures(spread_over_run(healthy(), events))


@pytest.mark.parametrize("number", [inf, -inf, nan, 1e308, -1e308, 5e-324], ids=str)
@pytest.mark.parametrize("steps", [range(200), range(100, 103), range(197, 200)], ids=["always", "in the middle", "at the end"])
def test_no_rule_fails_on_scalars_that_cannot_be_right(number, steps):
    run = [replace(step, scalars=dict.fromkeys(step.scalars, number)) if step.number in steps else step for step in healthy()]
    assert not failures(run)


def failures(steps: Sequence[Step]) -> dict[str, str]:
    with view_of(steps) as view:
        results = {outcome.rule.name: outcome.result for outcome in evaluate({0: view}, RULES)}
    return {name: result.reason for name, result in results.items() if isinstance(result, NotEvaluated) and "failed" in result.reason}


def test_an_integer_that_no_float_holds_makes_its_event_unreadable():
    event = decode("source", 3, {"call": "loader", "line": "train.py:4", "text": "", "num_workers": HUGE})
    assert isinstance(event, UnreadableEvent)
    assert event.reason == "num_workers should be int or null and is too large"
