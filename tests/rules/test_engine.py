"""The engine: every rule sees every step, one that fails harms nobody, and causes come before their consequences."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from synthetic import SITES, healthy, row, stuck, training

import sonde.rules
from sonde.events import STATISTICS, Finding, Kind, Severity, Site, Step
from sonde.rules import RULES
from sonde.rules.engine import Engine, in_order
from sonde.rules.rule import Clear, NotEvaluated
from sonde.rules.words import listing, modules_of, number


def modules():
    return [path.stem for path in Path(sonde.rules.__file__).parent.glob("*.py") if path.stem != "__init__"]


def test_the_tuple_of_rules_is_what_the_folder_holds():
    in_folder = set()
    for name in modules():
        module = importlib.import_module(f"sonde.rules.{name}")
        for _, thing in inspect.getmembers(module, inspect.isclass):
            if thing.__module__ == module.__name__ and hasattr(thing, "explains") and hasattr(thing, "answer") and hasattr(thing, "name"):
                in_folder.add(thing)
                assert thing.name == name.replace("_", "-")
    assert set(RULES) == in_folder
    assert len(RULES) == len(set(RULES))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_page_and_names_only_rules_that_exist(rule):
    page = inspect.getmodule(rule).__doc__
    for section in ("What it finds", "Why it matters", "How it knows", "Known problems", "Fix"):
        assert f"\n{section:<17}" in page
    assert set(rule.explains) <= {other.name for other in RULES} - {rule.name}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_that_saw_nothing_says_that_it_could_not_tell(rule):
    assert isinstance(rule().answer(), NotEvaluated)


def test_a_healthy_training_is_clear_by_every_rule():
    engine = Engine(RULES)
    for step in healthy():
        engine.see(step)
    assert {one.rule.name: one.answer for one in engine.outcomes()} == {rule.name: Clear() for rule in RULES}


class Broken:
    name = "broken"
    explains = ()

    def see(self, step):
        if step.number == 3:
            raise ValueError("no such thing")

    def answer(self):
        return Clear()


def test_a_rule_that_raises_is_not_evaluated_and_the_others_go_on():
    engine = Engine((Broken, *RULES))
    for step in training(loss=stuck, scalars=lambda s: {"lr": 0.0}):
        engine.see(step)
    outcomes = {one.rule.name: one.answer for one in engine.outcomes()}
    assert outcomes["broken"] == NotEvaluated("the rule failed at step 3 (ValueError: no such thing)")
    assert outcomes["lr-zero"][0].rule == "lr-zero"


def test_a_run_without_steps_is_not_evaluated():
    assert all(isinstance(one.answer, NotEvaluated) for one in Engine(RULES).outcomes())


def test_what_only_one_rank_shows_is_found_with_its_rank():
    engine = Engine(RULES)
    for sick, well in zip(training(rank=1, loss=stuck, scalars=lambda s: {"lr": 0.0}), training(rank=0)):
        engine.see(well)
        engine.see(sick)
    (finding,) = next(one.answer for one in engine.outcomes() if one.rule.name == "lr-zero")
    assert finding.evidence["rank"] == 1


def test_what_is_only_mentioned_explains_no_fault():
    mention = Finding("loss-spike", Severity.INFO, "", 3, "it leapt", "look at it")
    fault = Finding("lr-divergence", Severity.CRITICAL, "", 40, "it climbs", "lower it")
    assert in_order([mention, fault], {"loss-spike": ("lr-divergence",)}) == [fault, mention]


def test_a_resumed_attempt_is_judged_by_itself():
    engine = Engine(RULES)
    for step in (*training(loss=stuck, scalars=lambda s: {"lr": 0.0}), *healthy()):
        engine.see(step)
    assert all(one.answer == Clear() for one in engine.outcomes())


def test_state_stays_bounded_with_thousands_of_sites_and_steps():
    import sys

    import numpy as np

    from sonde.events import Frame

    sites = {i: Site(i, "parameter", f"blocks.{i}.weight", "model", "Linear", shape=(8, 8)) for i in range(5000)}
    ids = np.arange(5000, dtype=np.uint32)
    values = np.array([[row(l2=0.1)[name]] * 5000 for name in STATISTICS])
    engine = Engine(RULES)
    sizes = []
    for step in training(400, loss=stuck, observed=lambda s: False):
        frames = {}
        if step.number % 40 == 0:
            frames = {kind: Frame(kind, step.number, ids, STATISTICS, values) for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE)}
        engine.see(Step(step.number, 0, step.scalars, frames, step.events, {**SITES, **sites}))
        if step.number in (199, 399):
            sizes.append(_deep_size(engine, sys.getsizeof))
    assert sizes[1] < 1.05 * sizes[0]


def _deep_size(thing, size, seen=None) -> int:
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (type, Site)):
        return 0
    seen.add(id(thing))
    total = size(thing, 0)
    if isinstance(thing, dict):
        return total + sum(_deep_size(key, size, seen) + _deep_size(value, size, seen) for key, value in thing.items())
    if isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        return total + sum(_deep_size(item, size, seen) for item in thing)
    names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
    return total + sum(_deep_size(getattr(thing, name), size, seen) for name in names if hasattr(thing, name))


def finding(rule, severity=Severity.ERROR, step=0):
    return Finding(rule, severity, "", step, "cause", "fix", {})


EXPLAINS = {"a": ("b", "c"), "b": ("c", "d"), "d": ("b",), "e": ()}


def names(findings):
    return [(one.rule, one.evidence.get("consequence_of")) for one in findings]


def test_a_cause_comes_first_even_if_its_consequence_is_graver():
    assert names(in_order([finding("c", Severity.CRITICAL), finding("a")], EXPLAINS)) == [("a", None), ("c", "a")]


def test_a_consequence_of_a_consequence_follows_its_root():
    assert names(in_order([finding("c", step=9), finding("b", step=5), finding("a")], EXPLAINS)) == [("a", None), ("b", "a"), ("c", "a")]


def test_of_two_that_could_explain_each_other_the_earlier_is_the_cause():
    assert names(in_order([finding("b", step=5), finding("d", step=3)], EXPLAINS)) == [("d", None), ("b", "d")]


def test_unrelated_roots_stand_by_severity_then_step():
    given = [finding("e", Severity.WARNING, 1), finding("x", Severity.CRITICAL, 9), finding("y", Severity.CRITICAL, 2)]
    assert [one.rule for one in in_order(given, EXPLAINS)] == ["y", "x", "e"]


def test_modules_stand_for_their_parameters_only_where_all_are_meant():
    everything = ["enc.0.weight", "enc.0.bias", "enc.2.weight", "head.weight", "head.bias", "scale"]
    assert modules_of(["enc.0.weight", "enc.0.bias", "enc.2.weight"], everything) == ["enc"]
    assert modules_of(["enc.0.weight", "enc.0.bias"], everything) == ["enc.0"]
    assert modules_of(["enc.0.bias", "scale"], everything) == ["enc.0.bias", "scale"]


def test_numbers_are_said_as_a_person_would():
    said = [number(value) for value in (3.0, 0.00012345, float("nan"), float("-inf"), 1e9)]
    assert said == ["3", "0.000123", "NaN", "-Infinity", "1e+09"]


def test_long_listings_are_cut():
    assert listing(["a", "b", "c", "d"]) == "a, b, c and 1 more"
