"""The engine: every rule is evaluated, one that fails harms no other, and causes come before their consequences."""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

import sonde.rules
from sonde.events import STATISTICS, Finding, Frame, Kind, Severity, Site, Step
from sonde.formatting import listing, number
from sonde.rules import registry
from sonde.rules._shared.module_names import modules_of
from sonde.rules.engine import evaluate, order_findings
from sonde.rules.registry import RULES, all_rules
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Reduction, RunView, newest_views
from sonde.runlog.run_reader import Run
from synthetic_steps import SITES, healthy, row, stuck, training, view_of, write_log

HEALTHY = healthy()
BROKEN = training(loss=stuck, scalars=lambda s: {"lr": 0.0})


def results(steps, rules=RULES, rank=0):
    """By name of the rule."""
    with view_of(steps) as view:
        return {outcome.rule.name: outcome.result for outcome in evaluate({rank: view}, rules)}


def test_the_tuple_of_rules_is_what_the_folders_hold():
    folder = Path(sonde.rules.__file__).parent
    in_folders = []
    for path in folder.glob("[a-z]*/[a-z]*.py"):
        module = importlib.import_module(f"sonde.rules.{path.parent.name}.{path.stem}")
        in_folders += getattr(module, "RULES", [])
        if hasattr(module, "RULE"):
            in_folders.append(module.RULE)
            assert module.RULE.name == path.stem.replace("_", "-")
    assert sorted(rule.name for rule in RULES) == sorted(rule.name for rule in in_folders)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_page_and_names_only_rules_that_exist(rule):
    for section in ("What it finds", "Why it matters", "How it knows", "Known problems", "Fix"):
        assert f"\n{section:<17}" in rule.page
    assert set(rule.explains) <= {other.name for other in RULES} - {rule.name}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_that_has_nothing_to_go_by_says_so(rule):
    assert isinstance(results([], (rule,))[rule.name], NotEvaluated)


def test_a_healthy_training_is_clear_by_every_rule():
    assert results(HEALTHY) == {rule.name: Clear() for rule in RULES}


def test_a_rule_that_raises_is_not_evaluated_and_the_others_are():
    def fail(view):
        raise ValueError("no such thing")

    found = results(BROKEN, (Rule("broken", fail, page=""), *RULES))
    assert found["broken"] == NotEvaluated("the rule failed (ValueError: no such thing)")
    assert found["lr-zero"][0].rule == "lr-zero"


def test_a_single_finding_is_a_list_of_one():
    def check(view):
        return rule.finding(Severity.INFO, 3, cause="cause", fix="fix", evidence={"num": 1}, where="net.0")

    rule = Rule("single", check, page="")
    assert results(HEALTHY, (rule,))["single"] == [Finding("single", Severity.INFO, "net.0", 3, "cause", "fix", {"num": 1})]


def test_a_reduction_that_raises_fails_its_own_rule_only():
    def fail(block, state):
        raise ValueError("no such thing")

    reduction = Reduction((Kind.GRADIENT,), int, fail)
    bad = Rule("broken", lambda view: view.reduced(reduction) or Clear(), page="", reductions=(reduction,))
    found = results(HEALTHY, (bad, *RULES))
    assert found.pop("broken") == NotEvaluated("the rule failed (ValueError: no such thing)")
    assert all(result == Clear() for result in found.values())


def test_a_rule_without_what_it_needs_is_not_evaluated():
    rule = Rule("needy", lambda view: Clear(), page="", needs=("optimizer_steps", "no_such_scalar"))
    assert results(HEALTHY, (rule,))["needy"] == NotEvaluated("the run does not hold 'no_such_scalar'")
    rule = Rule("needy", lambda view: Clear(), page="", needs=(Kind.GRADIENT,))
    assert results(training(observed=lambda s: False), (rule,))["needy"] == NotEvaluated("no gradients of parameters were measured")


def test_what_only_one_rank_shows_is_found_with_its_rank():
    with ExitStack() as stack:
        views = {rank: stack.enter_context(view_of(steps)) for rank, steps in ((0, training()), (1, BROKEN))}
        (finding,) = next(outcome.result for outcome in evaluate(views, RULES) if outcome.rule.name == "lr-zero")
    assert finding.evidence["rank"] == 1


def test_what_is_only_mentioned_explains_no_fault():
    mention = Finding("loss-spike", Severity.INFO, "", 3, "it leapt", "look at it")
    fault = Finding("lr-divergence", Severity.CRITICAL, "", 40, "it climbs", "lower it")
    assert order_findings([mention, fault], {"loss-spike": ("lr-divergence",)}) == [fault, mention]


def test_what_begins_later_does_not_explain_a_spike():
    spike = Finding("loss-spike", Severity.INFO, "", 81, "it leapt", "look at it")
    swap, later = (Finding("stale-optimizer-params", Severity.ERROR, "", step, "stale", "build it later") for step in (76, 90))
    explains = {"stale-optimizer-params": ("loss-spike",)}
    assert [each.evidence.get("consequence_of") for each in order_findings([spike, swap], explains)] == [None, "stale-optimizer-params"]
    assert [each.evidence.get("consequence_of") for each in order_findings([spike, later], explains)] == [None, None]


def test_a_cause_ranks_as_high_as_the_worst_that_follows_from_it():
    cause = Finding("no-shuffle", Severity.WARNING, "", 0, "sorted", "shuffle")
    effect = Finding("dead-relu", Severity.CRITICAL, "", 16, "dead", "lower it")
    other = Finding("eval-in-train-mode", Severity.ERROR, "", 0, "dropout", "call eval()")
    explains = {rule.name: rule.explains for rule in RULES}
    assert [each.rule for each in order_findings([other, effect, cause], explains)] == ["no-shuffle", "dead-relu", "eval-in-train-mode"]


@pytest.mark.parametrize("rule", ["dead-relu", "exploding-gradient"])
def test_the_order_of_the_data_does_not_explain_what_is_there_before_the_first_update(rule):
    cause = Finding("no-shuffle", Severity.WARNING, "", 0, "sorted", "shuffle")
    effect = Finding(rule, Severity.CRITICAL, "", 0, "from the start", "initialize it otherwise")
    ordered = order_findings([cause, effect], {each.name: each.explains for each in RULES})
    assert [(each.rule, each.evidence.get("consequence_of")) for each in ordered] == [(rule, None), ("no-shuffle", None)]


def test_of_a_bad_number_and_a_large_update_in_one_step_the_bad_number_is_the_cause():
    bad = Finding("nonfinite-origin", Severity.CRITICAL, "", 3, "log of zero", "clamp it")
    large = Finding("lr-divergence", Severity.CRITICAL, "", 3, "a large update", "lower the rate")
    explains = {rule.name: rule.explains for rule in RULES}
    assert [each.rule for each in order_findings([large, bad], explains)] == ["nonfinite-origin", "lr-divergence"]
    earlier = Finding("lr-divergence", Severity.CRITICAL, "", 2, "a large update", "lower the rate")
    assert [each.rule for each in order_findings([bad, earlier], explains)] == ["lr-divergence", "nonfinite-origin"]


def test_a_repeated_step_number_in_one_file_is_damage_and_its_first_row_counts():
    assert results([*HEALTHY, *BROKEN]) == {rule.name: Clear() for rule in RULES}


def test_the_newest_attempt_is_judged(tmp_path):
    for attempt, steps in enumerate((BROKEN, HEALTHY)):
        write_log(tmp_path / f"rank0-{attempt}-000.sonde", steps, attempt=attempt)
    outcomes = evaluate(newest_views(Run(tmp_path)), RULES)
    assert all(outcome.result == Clear() for outcome in outcomes)


def test_reductions_stay_small_with_thousands_of_sites():
    sites = {i: Site(i, "parameter", f"blocks.{i}.weight", "model", "Linear", shape=(8, 8)) for i in range(2000)}
    ids = np.arange(2000, dtype=np.uint32)
    values = np.array([[row(l2=0.1)[name]] * 2000 for name in STATISTICS])

    def states(num_steps):
        steps = []
        for step in training(num_steps, loss=stuck, observed=lambda s: False):
            frames = {}
            if step.number % 40 == 0:
                frames = {kind: Frame(kind, step.number, ids, STATISTICS, values) for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE)}
            steps.append(Step(step.number, 0, step.scalars, frames, step.events, {**SITES, **sites}))
        with view_of(steps) as view:
            return sum(_deep_size(view.reduced(each)) for rule in RULES for each in rule.reductions)

    assert states(800) < 1.1 * states(400)


def _deep_size(thing, seen=None) -> int:
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (type, Site)):
        return 0
    seen.add(id(thing))
    total = sys.getsizeof(thing, 0)
    if isinstance(thing, dict):
        return total + sum(_deep_size(key, seen) + _deep_size(value, seen) for key, value in thing.items())
    if isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        return total + sum(_deep_size(item, seen) for item in thing)
    names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
    return total + sum(_deep_size(getattr(thing, name), seen) for name in names if hasattr(thing, name))


class TestRulesOfOtherPackages:
    """Entry points of the group `sonde.rules`."""

    @pytest.fixture(autouse=True)
    def _no_cache(self):
        all_rules.cache_clear()
        yield
        all_rules.cache_clear()

    def provide(self, monkeypatch, tmp_path, **entry_points):
        (tmp_path / "other_package.py").write_text(
            "from sonde.rules.rule import Clear, Rule\nRULE = Rule('other-rule', lambda view: Clear(), page='…')\nNOT_A_RULE = 3\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        points = [EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in entry_points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    def test_a_rule_of_another_package_is_evaluated(self, monkeypatch, tmp_path):
        self.provide(monkeypatch, tmp_path, other="other_package:RULE")
        assert results(HEALTHY, all_rules())["other-rule"] == Clear()

    @pytest.mark.parametrize(
        ("value", "reason"),
        [("other_package:NOT_A_RULE", "is a int, not a"), ("other_package:MISSING", "cannot be loaded (AttributeError")],
    )
    def test_one_that_is_none_or_cannot_be_loaded_is_not_evaluated(self, monkeypatch, tmp_path, value, reason):
        self.provide(monkeypatch, tmp_path, other=value)
        assert reason in results(HEALTHY, all_rules())["other"].reason

    def test_no_package_replaces_a_rule_of_sonde(self, monkeypatch, tmp_path):
        self.provide(monkeypatch, tmp_path, **{"lr-zero": "other_package:MISSING"})
        assert all_rules() == RULES


def finding(rule, severity=Severity.ERROR, step=0):
    return Finding(rule, severity, "", step, "cause", "fix", {})


EXPLAINS = {"a": ("b", "c"), "b": ("c", "d"), "d": ("b",), "e": ()}


def names(findings):
    return [(one.rule, one.evidence.get("consequence_of")) for one in findings]


def test_a_cause_comes_first_even_if_its_consequence_is_graver():
    assert names(order_findings([finding("c", Severity.CRITICAL), finding("a")], EXPLAINS)) == [("a", None), ("c", "a")]


def test_a_consequence_of_a_consequence_follows_its_root():
    ordered = order_findings([finding("c", step=9), finding("b", step=5), finding("a")], EXPLAINS)
    assert names(ordered) == [("a", None), ("b", "a"), ("c", "a")]


def test_of_two_that_could_explain_each_other_the_earlier_is_the_cause():
    assert names(order_findings([finding("b", step=5), finding("d", step=3)], EXPLAINS)) == [("d", None), ("b", "d")]


def test_unrelated_roots_stand_by_severity_then_step():
    given = [finding("e", Severity.WARNING, 1), finding("x", Severity.CRITICAL, 9), finding("y", Severity.CRITICAL, 2)]
    assert [one.rule for one in order_findings(given, EXPLAINS)] == ["y", "x", "e"]


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


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def _exits(view: RunView) -> Result:
    raise SystemExit(0)


def _unspeakable(view: RunView) -> Result:
    raise _Unspeakable


FINDING = Finding("other", Severity.WARNING, "", 0, "cause", "fix")


@pytest.mark.parametrize(
    "check",
    [
        _exits,
        _unspeakable,
        lambda view: None,
        lambda view: 5,
        lambda view: "abc",
        lambda view: (each for each in [FINDING]),
        lambda view: [None],
        lambda view: [replace(FINDING, step=None)],
        lambda view: [replace(FINDING, severity="warning")],
        lambda view: [replace(FINDING, cause=None)],
        lambda view: [replace(FINDING, evidence={"object": object()})],
        lambda view: [replace(FINDING, evidence=None)],
    ],
)
def test_a_rule_that_exits_or_returns_something_else_is_not_evaluated_and_the_others_are(check):
    found = results(HEALTHY, (Rule("other", check, page=""), *RULES))
    assert isinstance(found.pop("other"), NotEvaluated)
    assert found == {rule.name: Clear() for rule in RULES}


def test_a_rule_cannot_fill_the_report():
    with view_of(HEALTHY) as view:
        (outcome,) = evaluate({0: view}, [Rule("other", lambda view: [FINDING] * 20_000, page="")])
    assert len(outcome.result) == 100


@pytest.mark.parametrize(
    "attribute",
    ["sys.exit(0)", "Rule(5, print, '')", *(f"Rule('other', print, {rest})" for rest in ("None", "'', needs=None", "'', reductions=(5,)"))],
)
def test_an_entry_point_that_is_no_valid_rule_is_listed_as_not_evaluated(attribute, tmp_path, monkeypatch):
    (tmp_path / "foreign_rule.py").write_text(f"import sys\nfrom sonde.rules.rule import Rule\nRULE = {attribute}\n")
    (tmp_path / "foreign-1.0.dist-info").mkdir()
    (tmp_path / "foreign-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (tmp_path / "foreign-1.0.dist-info" / "entry_points.txt").write_text("[sonde.rules]\nforeign = foreign_rule:RULE\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign_rule", raising=False)
    all_rules.cache_clear()
    try:
        found = results(HEALTHY, all_rules())
    finally:
        all_rules.cache_clear()
    assert isinstance(found["foreign"], NotEvaluated)
