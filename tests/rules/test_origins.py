"""The rules that read where a bad number was made."""

from math import nan

import pytest
from synthetic import opening, training

from sonde.record import Event
from sonde.rules import RULES
from sonde.rules.engine import Engine, in_order
from sonde.rules.origins import KEYS
from sonde.rules.rule import NotEvaluated


def origin(key="log-of-zero", **given):
    data = {
        "kind": "inf", "phase": "forward", "operation": "log", "module": "head", "source": "train.py:41", "text": "loss = p.log()",
        "cause": "log of 2 zeros among 32 values", "fix": "clamp it", "key": key, "samples": [3, 9], "indices": [40, 77], "inputs": [],
        "parameters": [], "caveats": [],
    }  # fmt: skip
    return Event("origin", 20, data | given)


def judged(*events):
    bad = {20: [Event("nonfinite", 20, {"what": "loss", "where": "loss"}), *events]}
    engine = Engine(RULES)
    for step in training(30, loss=lambda step: 1.0 if step < 20 else nan, events=bad, start=opening()):
        engine.see(step)
    return engine.outcomes()


def findings(*events):
    found = [finding for outcome in judged(*events) if isinstance(outcome.answer, list) for finding in outcome.answer]
    return in_order(found, {rule.name: rule.explains for rule in RULES})


def test_the_origin_comes_first_and_the_bad_loss_follows_from_it():
    first, *rest = findings(origin())
    assert first.rule == "nonfinite-origin"
    assert first.evidence["source"] == "train.py:41"
    assert "samples 3, 9 of the batch (items 40, 77 of the dataset)" in first.cause
    assert [finding.evidence["consequence_of"] for finding in rest if finding.rule == "nonfinite-loss"] == ["nonfinite-origin"]


@pytest.mark.parametrize(("rule", "key"), [(rule, key) for rule, keys in KEYS.items() for key in keys])
def test_a_defect_with_a_rule_of_its_own_is_named_by_it_alone(rule, key):
    names = [finding.rule for finding in findings(origin(key))]
    assert names[0] == rule
    assert "nonfinite-origin" not in names


def test_an_origin_that_could_not_be_found_is_not_evaluated_with_the_reason():
    answers = {one.rule.name: one.answer for one in judged(Event("origin_unknown", 20, {"reason": "it reads from a stream"}))}
    answer = answers["nonfinite-origin"]
    assert isinstance(answer, NotEvaluated)
    assert "it reads from a stream" in answer.reason
