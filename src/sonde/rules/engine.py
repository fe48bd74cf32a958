"""Evaluates the rules on a run, and orders what they found: causes first, then their consequences.

A rule that raises is reported as not evaluated; the others are evaluated all the same. The same holds for a rule whose
finding contradicts its own evidence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sonde.events import Finding, Severity
from sonde.rules._shared.origin_search_results import NONFINITE_RULES
from sonde.rules.contradictions import contradiction
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

MAX_FINDINGS = 100  # of one rule: nobody reads more
SUDDEN = ("loss-spike", "gradient-spike")  # they happen in one step: what begins later does not explain them
BY_UPDATES = ("no-shuffle",)  # they harm by a row of updates only …
AT_START = ("dead-relu", "exploding-gradient")  # … and do not explain these, if they are there from the start: the initialization made them


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one rule for the whole run."""

    rule: Rule
    result: Result


def evaluate(views: Mapping[int, RunView], rules: Sequence[Rule]) -> list[Outcome]:
    """One outcome per rule. `views`: the judged attempt of each rank. The lowest rank on which a rule found something counts."""
    with np.errstate(all="ignore"):  # values of a training that diverges overflow, and users may have set numpy to raise
        by_rank = {rank: _results(view, rules) for rank, view in sorted(views.items())}
    return [Outcome(rule, _merged({rank: results[index] for rank, results in by_rank.items()})) for index, rule in enumerate(rules)]


def _results(view: RunView, rules: Sequence[Rule]) -> list[Result]:
    reasons = [_missing_need(rule, view) for rule in rules]
    view.reduce_together([each for rule, reason in zip(rules, reasons) if not reason for each in rule.reductions])
    return [NotEvaluated(reason) if reason else _result(rule, view) for rule, reason in zip(rules, reasons)]


# A rule may come from another package: one that fails, exits or returns something else must not silence the others.


def _missing_need(rule: Rule, view: RunView) -> str:
    try:
        return rule.missing_need(view)
    except Exception as error:
        return f"the rule failed ({describe_error(error)})"


def _result(rule: Rule, view: RunView) -> Result:
    try:
        result, missing = view.missing_for(rule.check)
    except (Exception, SystemExit) as error:
        return NotEvaluated(f"the rule failed ({describe_error(error)})")
    if isinstance(result, Clear) and missing:  # nothing is found in what was not seen
        return NotEvaluated(missing)
    if isinstance(result, (Clear, NotEvaluated)):
        return result
    findings = [result] if isinstance(result, Finding) else result
    if not isinstance(findings, (list, tuple)):
        return NotEvaluated(f"the rule returned a {type(findings).__name__}, not findings, Clear() or NotEvaluated(reason)")
    wrong = next((reason for each in findings if (reason := _why_invalid(each))), "")
    if wrong:
        return NotEvaluated(f"the rule returned {wrong}")
    contradictions = [contradiction(each) for each in findings[:MAX_FINDINGS]]
    reason = next(filter(None, contradictions), "")
    consistent = [each for each, reason in zip(findings, contradictions) if not reason]
    return NotEvaluated(reason) if reason and not consistent else consistent


def _why_invalid(finding: object) -> str:
    if not isinstance(finding, Finding):
        return f"a {type(finding).__name__} among its findings"
    texts = (finding.rule, finding.where, finding.cause, finding.fix)
    is_valid = all(isinstance(text, str) for text in texts) and isinstance(finding.step, int) and isinstance(finding.severity, Severity)
    if not is_valid or not isinstance(finding.evidence, Mapping):
        return "a finding with a field of the wrong type"
    is_known = all(isinstance(name, str) and isinstance(value, (int, float, str)) for name, value in finding.evidence.items())
    return "" if is_known else "evidence that is neither a number nor a text"


def describe_error(error: BaseException) -> str:
    """Type and message of an error of another package, whose message may fail too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _merged(by_rank: Mapping[int, Result]) -> Result:
    for rank, result in by_rank.items():
        if isinstance(result, Sequence) and result:
            if len(by_rank) == 1:
                return result
            return [replace(finding, evidence={**finding.evidence, "rank": rank}) for finding in result]
    evaluated = [result for result in by_rank.values() if not isinstance(result, NotEvaluated)]
    return next(iter(evaluated or by_rank.values()), NotEvaluated("no complete step was recorded"))


def order_findings(findings: Sequence[Finding], explains: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Root causes first, the most severe and then the earliest before the others; after each its consequences, with `consequence_of` in
    their evidence.

    Args:
        explains: By rule the rules whose findings it explains.
    """
    causes = {id(finding): _root_cause(finding, findings, explains) for finding in findings}
    roots = [finding for finding in findings if causes[id(finding)] is None]
    ordered: list[Finding] = []
    consequences_of = {id(root): [finding for finding in findings if causes[id(finding)] is root] for root in roots}

    def priority(root: Finding) -> tuple[int, tuple[int, int, str]]:
        # A cause is as severe as the worst that follows from it.
        return min(-each.severity.rank for each in (root, *consequences_of[id(root)])), _priority(root)

    for root in sorted(roots, key=priority):
        ordered.append(root)
        consequences = consequences_of[id(root)]
        ordered += [replace(each, evidence={**each.evidence, "consequence_of": root.rule}) for each in sorted(consequences, key=_priority)]
    return ordered


def _root_cause(finding: Finding, findings: Sequence[Finding], explains: Mapping[str, Sequence[str]]) -> Finding | None:
    """The root cause that this finding follows from; None if it is one itself."""
    passed = {finding.rule}
    root: Finding | None = None
    current = finding
    while True:
        causes = [each for each in findings if each.rule not in passed and _explains(each, current, explains)]
        if not causes:
            return root
        root = current = min(causes, key=_priority)
        passed.add(root.rule)


def _explains(cause: Finding, effect: Finding, explains: Mapping[str, Sequence[str]]) -> bool:
    if effect.rule not in explains.get(cause.rule, ()):
        return False
    if cause.severity is Severity.INFO and effect.severity is not Severity.INFO:
        return False  # what is only mentioned is not what is wrong
    if cause.rule in BY_UPDATES and effect.rule in AT_START and effect.step <= cause.step:
        return False
    if cause.rule not in explains.get(effect.rule, ()):
        return cause.step <= effect.step or effect.rule not in SUDDEN
    # Each could explain the other: the earlier one is the cause.
    return _moment(cause) < _moment(effect)


def _moment(finding: Finding) -> tuple[int, bool, str]:
    """To order findings by time. In one step, forward and backward come before the update."""
    return finding.step, finding.rule not in (*NONFINITE_RULES, *SUDDEN), finding.rule


def _priority(finding: Finding) -> tuple[int, int, str]:
    return -finding.severity.rank, finding.step, finding.rule
