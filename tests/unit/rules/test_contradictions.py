"""No finding is printed whose cause its own evidence contradicts."""

from __future__ import annotations

import re

import pytest

from sonde.events import Finding, Severity
from sonde.rules.contradictions import CLAIMS, contradiction
from sonde.rules.engine import evaluate
from sonde.rules.registry import RULES
from sonde.rules.rule import NotEvaluated, Rule
from synthetic_steps import training, view_of

# By pattern: a cause as the rule writes it, evidence that contradicts it, evidence that does not.
EXAMPLES = {
    r"no gradient reaches (\d+) of (\d+) parameters": (
        "the loss is at 2.3; no gradient reaches 19 of 19 parameters", {"update_per_weight": 0.327}, {"update_per_weight": 0.0}),
    r"an update changes the weights by only": (
        "an update changes the weights by only 0.01 of their size", {"update_per_weight": 0.01}, {"update_per_weight": 1e-8}),
    r"the loss is still": (
        "after 90 updates the loss is still 2.3", {"first_level": 9.0, "recent_level": 2.3}, {"first_level": 2.3, "recent_level": 2.31}),
    r"the loss did not fall": (
        "the loss did not fall (2 at first)", {"first_loss": 2.0, "recent_loss": 1.0}, {"first_loss": 2.0, "recent_loss": 2.0}),
    r"the loss rose from": ("the loss rose from 2 to 1", {"first_loss": 2.0, "recent_loss": 1.0}, {"first_loss": 2.0, "recent_loss": 9.0}),
    r"an update was \S+ times the size of (?:all|the measured) weights": (
        "an update was 0.1 times the size of all weights", {"largest_update_per_weight": 0.1}, {"largest_update_per_weight": 4.0}),
    r"losses are not finite": ("0 of 60 losses are not finite", {"num_nonfinite": 0}, {"num_nonfinite": 3}),
    r"backward was never called": ("all 5 steps found nothing, and backward was never called", {"backwards": 5}, {"backwards": 0}),
    r"step\(\) was never called": ("backward ran, but optimizer.step() was never called", {"optimizer_steps": 9}, {"optimizer_steps": 0}),
    r"zero_grad\(\) was never called": ("zero_grad() was never called", {"zero_grads": 4}, {"zero_grads": 0}),
    r"used gradients that still held": ("0 of 9 steps used gradients that still held old ones", {"stale_updates": 0}, {"stale_updates": 8}),
    r"were cleared": ("0 of 9 steps found no gradient, because they were cleared", {"cleared_updates": 0}, {"cleared_updates": 9}),
    r"no optimizer holds": ("2 of 4 parameters receive gradients, but no optimizer holds them", {"num_unowned": 0}, {"num_unowned": 2}),
    r"are in no optimizer": ("4 parameters get gradients and are in no optimizer", {"num_unowned": 0}, {"num_unowned": 4}),
    r"did not change at all": ("2 of 4 parameters each time did not change at all", {"restored": "yes"}, {"restored": "no"}),
    r"was never stepped": ("LambdaLR begins with a warm-up and was never stepped", {"scheduler_steps": 9}, {"scheduler_steps": 0}),
    r"is exactly 0 in": ("the learning rate is exactly 0 in 0 of 9 optimizer steps", {"num_zero": 0}, {"num_zero": 9}),
    r"from forwards in eval mode": ("0 of 9 updates came from forwards in eval mode", {"updates_in_eval": 0}, {"updates_in_eval": 9}),
    r"without gradients in training mode": (
        "the model was run without gradients in training mode", {"pauses_in_training_mode": 0}, {"pauses_in_training_mode": 2}),
    r"the same input for all samples": ("the model received the same input for all samples", {"batch_size": 1}, {"batch_size": 32}),
    r"were the same \d+ samples": ("all 9 batches were the same 8 samples", {"num_batches": 1}, {"num_batches": 20}),
    r"the labels come sorted": (
        "the labels come sorted", {"distinct": 7.0, "distinct_by_chance": 7.0}, {"distinct": 1.0, "distinct_by_chance": 7.0}),
    r"each return the whole": ("the 2 workers each return the whole Log", {"num_alike": 0}, {"num_alike": 2}),
    r"draw the same random numbers": ("the 1 workers draw the same random numbers", {"num_workers": 1}, {"num_workers": 2}),
    r"has no workers": ("the DataLoader has no workers", {"num_workers": 2}, {"num_workers": 0}),
    r"^the input of step \d+ had": ("the input of step 0 had 0 NaN", {"num_nan": 0.0, "num_inf": 0.0}, {"num_nan": 3.0, "num_inf": 0.0}),
    r"outputs \S+ % zeros": ("the ReLU act outputs 40 % zeros", {"zero_share": 0.4}, {"zero_share": 1.0}),
    r"^the gradient at .+ times that at": (
        "the gradient at inp is 3 times that at out", {"first_over_last": 3.0}, {"first_over_last": 1e-5}),
    r"^the gradient norm jumped": ("the gradient norm jumped to more than 100 times its usual 1", {"num_leaps": 0}, {"num_leaps": 4}),
    r"jumped to \S+, where": ("the loss jumped to 1, where 2 is usual", {"value": 1.0, "usual": 2.0}, {"value": 9.0, "usual": 2.0}),
    r"the scale fell from": (
        "the scale fell from 1 to 4", {"first_scale": 1.0, "lowest_scale": 4.0}, {"first_scale": 4.0, "lowest_scale": 1.0}),
    r"so no scale can help": ("with or without, so no scale can help", {"made_by": "the scale"}, {"made_by": "the numbers themselves"}),
}  # fmt: skip


def finding(cause, evidence):
    return Finding("example", Severity.CRITICAL, "", 0, cause, "fix", evidence)


def test_every_claim_is_made_by_a_rule_and_has_an_example_here():
    assert {claim.words for claim in CLAIMS} == set(EXAMPLES)
    assert {claim.rule for claim in CLAIMS} <= {rule.name for rule in RULES}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.words)
def test_a_claim_is_withheld_only_if_the_evidence_says_the_opposite(claim):
    cause, contradicting, agreeing = EXAMPLES[claim.words]
    reason = contradiction(finding(cause, contradicting))
    assert re.search(claim.words, cause)[0] in reason
    assert all(name in reason for name in claim.evidence if name in contradicting)
    assert not contradiction(finding(cause, agreeing))


def test_part_of_a_model_may_get_no_gradient_while_the_rest_is_updated():
    assert not contradiction(finding("no gradient reaches 12 of 19 parameters", {"update_per_weight": 0.3}))


def test_evidence_that_is_absent_or_unknown_contradicts_nothing():
    for cause, contradicting, _ in EXAMPLES.values():
        numbers = {name: float("nan") for name, value in contradicting.items() if not isinstance(value, str)}
        if numbers:
            assert not contradiction(finding(cause, numbers))
            assert not contradiction(finding(cause, {}))


def results(*findings):
    rule = Rule("example", lambda view: list(findings), page="")
    with view_of(training()) as view:
        return evaluate({0: view}, (rule,))[0].result


def test_a_rule_whose_finding_contradicts_its_evidence_is_not_evaluated_and_the_reason_is_given():
    contradicted = finding("after 90 updates nothing; no gradient reaches 19 of 19 parameters", {"update_per_weight": 0.327})
    expected = "it would say 'no gradient reaches 19 of 19 parameters', which its evidence contradicts (update_per_weight 0.327)"
    assert results(contradicted) == NotEvaluated(expected)


def test_other_findings_of_the_same_rule_remain():
    contradicted, other = finding("the loss did not fall", {"first_loss": 2.0, "recent_loss": 0.1}), finding("something else", {})
    assert results(contradicted, other) == [other]
