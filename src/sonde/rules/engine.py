"""Evaluates the rules on a run, and orders what they found: causes first, then their consequences.

A rule that raises is reported as not evaluated; the others are evaluated all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sonde.events import Finding, Severity
from sonde.rules.rule import NotEvaluated, Result, Rule
from sonde.run_view import RunView


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
    reasons = [rule.missing_need(view) for rule in rules]
    view.reduce_together([each for rule, reason in zip(rules, reasons) if not reason for each in rule.reductions])
    return [NotEvaluated(reason) if reason else _result(rule, view) for rule, reason in zip(rules, reasons)]


def _result(rule: Rule, view: RunView) -> Result:
    try:
        result = rule.check(view)
        return [result] if isinstance(result, Finding) else result
    except Exception as error:  # a rule may come from another package; one that fails must not silence the others
        return NotEvaluated(f"the rule failed ({type(error).__name__}: {error})")


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
    for root in sorted(roots, key=_priority):
        ordered.append(root)
        consequences = [finding for finding in findings if causes[id(finding)] is root]
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
    if cause.rule not in explains.get(effect.rule, ()):
        return True
    # Each could explain the other: the earlier one is the cause.
    return cause.step < effect.step or (cause.step == effect.step and cause.rule < effect.rule)


def _priority(finding: Finding) -> tuple[int, int, str]:
    return -finding.severity.rank, finding.step, finding.rule
