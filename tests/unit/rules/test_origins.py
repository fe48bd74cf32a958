"""The rules that read where a bad number was made."""

from math import nan

import pytest

from sonde.events import Event
from sonde.rules._shared.origin_search_results import OPERATION_DEFECTS
from sonde.rules.engine import evaluate, order_findings
from sonde.rules.loss.lr_divergence import RULE as lr_divergence
from sonde.rules.nonfinite.nan_operation_rules import RULES as OPERATION_RULES
from sonde.rules.nonfinite.nonfinite_evaluation import RULE as nonfinite_evaluation
from sonde.rules.nonfinite.nonfinite_loss import RULE as nonfinite_loss
from sonde.rules.nonfinite.nonfinite_origin import RULE as nonfinite_origin
from sonde.rules.rule import Clear, NotEvaluated
from synthetic_steps import LAYERS, ask, opening, row, the_finding, training, view_of, why_not

RULES = (nonfinite_origin, nonfinite_loss, nonfinite_evaluation, lr_divergence, *OPERATION_RULES)


def origin(key="log-of-zero", step=20, **given):
    data = {
        "kind": "inf", "phase": "forward", "operation": "log", "module": "head", "source": "train.py:41", "text": "loss = p.log()",
        "cause": "log of 2 zeros among 32 values", "fix": "clamp it", "key": key, "samples": [3, 9], "indices": [40, 77], "inputs": [],
        "parameters": [], "caveats": [],
    }  # fmt: skip
    return Event("origin", step, data | given)


def judged(*events):
    bad = {20: [Event("nonfinite", 20, {"what": "loss", "where": "loss"}), *events]}
    with view_of(training(30, loss=lambda step: 1.0 if step < 20 else nan, events=bad, start=opening())) as view:
        return evaluate({0: view}, RULES)


def findings(*events):
    found = [finding for outcome in judged(*events) if isinstance(outcome.result, list) for finding in outcome.result]
    return order_findings(found, {rule.name: rule.explains for rule in RULES})


def test_the_origin_comes_first_and_the_bad_loss_follows_from_it():
    first, *rest = findings(origin())
    assert first.rule == "nonfinite-origin"
    assert first.evidence["source"] == "train.py:41"
    assert "samples 3, 9 of the batch (items 40, 77 of the dataset)" in first.cause
    assert [finding.evidence["consequence_of"] for finding in rest if finding.rule == "nonfinite-loss"] == ["nonfinite-origin"]


@pytest.mark.parametrize(("rule", "key"), [(rule, key) for rule, keys in OPERATION_DEFECTS.items() for key in keys])
def test_a_defect_with_a_rule_of_its_own_is_named_by_it_alone(rule, key):
    names = [finding.rule for finding in findings(origin(key))]
    assert names[0] == rule
    assert "nonfinite-origin" not in names


def test_an_origin_that_could_not_be_found_is_not_evaluated_with_the_reason():
    answers = {one.rule.name: one.result for one in judged(Event("origin_unknown", 20, {"reason": "it reads from a stream"}))}
    answer = answers["nonfinite-origin"]
    assert isinstance(answer, NotEvaluated)
    assert "it reads from a stream" in answer.reason


def bad_gradients(*steps):
    events = {step: [Event("nonfinite", step, {"what": "gradient", "where": "head.weight"})] for step in steps}
    events[steps[0]].append(Event("origin_unknown", steps[0], {"what": "gradient", "reason": "it reads from a stream"}))
    return training(30, loss=lambda step: 1.0, events=events, start=opening())


def test_gradients_that_stay_bad_under_a_finite_loss_are_a_finding_even_without_an_origin():
    finding = the_finding(nonfinite_origin, bad_gradients(*range(20, 30)))
    assert (finding.step, finding.where) == (20, "head.weight")
    assert "it reads from a stream" in finding.cause


def test_a_bad_gradient_that_passes_is_no_finding_without_an_origin():
    assert "it reads from a stream" in why_not(nonfinite_origin, bad_gradients(20, 21))


def sizes(step):
    """The output of one layer doubles with every step."""
    return {"activation": {path: row(min=-1.0, max=0.1 * 2.0**step if path == "net.6" else 1.5) for path in LAYERS}}


def grown(**given):
    happened = {9: [origin(step=9, after=["model.net.6", "model.net.4"], module="model.head", key="exp-overflow", **given)]}
    return the_finding(nonfinite_origin, training(12, frames=sizes, events=happened))


def test_the_history_of_what_the_operation_was_given_is_shown_with_its_steps():
    assert grown().evidence["largest"] == "output of model.net.6: 1, 1, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2 at steps 2, 3, 4, 5, 6, 7, 8, 9"


def test_the_bad_step_itself_ends_the_history_although_it_was_not_observed():
    events = {23: [origin(step=23, module="model.head", sizes=[["model.head", 812.5]])]}
    finding = the_finding(nonfinite_origin, training(30, events=events))
    assert finding.evidence["largest"].endswith("1.5, 812 at steps 6, 7, 8, 9, 10, 11, 15, 23")
    assert "went from 1.5 at step 6 to 812 at step 23" in finding.cause


def test_a_number_that_grew_is_said_in_the_cause():
    assert "the largest number in the output of model.net.6 went from 1 at step 2 to 51.2 at step 9" in grown().cause


def test_a_layer_that_was_not_measured_has_no_history_and_the_next_behind_it_has():
    happened = {9: [origin(step=9, after=["model.nobody", "model.net.4"], parameters=["model.head.weight"])]}
    evidence = the_finding(nonfinite_origin, training(12, frames=sizes, events=happened)).evidence
    assert evidence["largest"].startswith("output of model.net.4: 1.5, 1.5")
    assert evidence["largest 2"].startswith("model.head.weight: 1.5, ")


def test_bad_numbers_stay_in_the_history():
    def frames(step):
        return {"activation": {"head": row(min=0.0, max=0.0, nan=1000) if step == 8 else row(max=4.0, inf=step == 7)}}

    happened = {9: [origin(step=9, module="model.head")]}
    shown = the_finding(nonfinite_origin, training(12, frames=frames, events=happened)).evidence["largest"]
    assert shown == "output of model.head: 4, 4, 4, 4, 4, 4 and Inf, NaN, 4 at steps 2, 3, 4, 5, 6, 7, 8, 9"


def test_a_bad_gradient_is_shown_with_its_own_history():
    happened = {9: [origin(step=9, what="gradient", bad="model.net.0.weight")]}
    evidence = the_finding(nonfinite_origin, training(12, events=happened)).evidence
    assert evidence["largest"].startswith("gradient of model.net.0.weight: 0.1, 0.1")


# ---- in evaluation


def evaluation(**given):
    return Event("nonfinite", 20, {"what": "evaluation", "where": "", "num_elements": 64, "num_nan": 2, "num_inf": 0} | given)


def test_a_bad_output_in_evaluation_is_an_error_of_its_own_and_explains_nothing():
    events = {20: [evaluation(), origin(what="evaluation")]}
    finding = the_finding(nonfinite_evaluation, training(30, events=events))
    assert (str(finding.severity), finding.step) == ("error", 20)
    assert finding.cause.startswith("in evaluation, at step 20, log made the first Inf at train.py:41")
    assert isinstance(ask(nonfinite_origin, training(30, events=events)), Clear)


def test_a_bad_output_without_an_origin_is_told_with_the_reason():
    events = {20: [evaluation(), Event("origin_unknown", 20, {"what": "evaluation", "reason": "it reads from a stream"})]}
    finding = the_finding(nonfinite_evaluation, training(30, events=events))
    assert "the model returned 2 NaN among 64 numbers; where they were made could not be found: it reads from a stream" in finding.cause


def test_evaluations_without_a_bad_number_are_clear_and_without_an_evaluation_nothing_is_said():
    assert isinstance(ask(nonfinite_evaluation, training(30, scalars=lambda step: {"eval_forwards": 1})), Clear)
    assert "evaluation" in why_not(nonfinite_evaluation, training(30))
