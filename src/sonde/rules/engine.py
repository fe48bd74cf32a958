"""Runs the rules over the steps of a run, and puts what they found in order: causes first, their consequences after
them.

Bounded memory: each rule keeps what it needs, the steps are forgotten. A rule that raises is reported as not
evaluated; the others go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sonde.events import Finding, Severity, Step
from sonde.rules.rule import Answer, NotEvaluated, Rule


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule answered about the whole run."""

    rule: type[Rule]
    answer: Answer


class Engine:
    """Give it every step in order with `see`; ask for the outcomes at any time."""

    def __init__(self, rules: Sequence[type[Rule]]) -> None:
        self._rules = tuple(rules)
        self._folds: dict[int, _Folds] = {}  # one set per rank: each process trains in its own order

    def see(self, step: Step) -> None:
        folds = self._folds.get(step.rank)
        if folds is None or step.number <= folds.last_step:  # a step again: a resumed attempt, to be judged by itself
            folds = self._folds[step.rank] = _Folds(self._rules)
        folds.see(step)

    def outcomes(self) -> list[Outcome]:
        """One per rule: what was found on the lowest rank that found something."""
        by_rank = {rank: self._folds[rank].answers() for rank in sorted(self._folds)}
        return [Outcome(rule, self._merged(index, by_rank)) for index, rule in enumerate(self._rules)]

    @staticmethod
    def _merged(index: int, by_rank: Mapping[int, Sequence[Answer]]) -> Answer:
        answers = {rank: row[index] for rank, row in by_rank.items()}
        for rank, answer in answers.items():
            if not isinstance(answer, Sequence):
                continue
            if len(answers) == 1:
                return answer
            return [replace(finding, evidence={**finding.evidence, "rank": rank}) for finding in answer]
        clear = [answer for answer in answers.values() if not isinstance(answer, NotEvaluated)]
        return next(iter(clear or answers.values()), NotEvaluated("no complete step was recorded"))


class _Folds:
    """The rules of one process, and what became of them."""

    def __init__(self, rules: Sequence[type[Rule]]) -> None:
        self.rules: list[Rule] = [rule() for rule in rules]
        self.errors: dict[int, str] = {}
        self.last_step = -1

    def see(self, step: Step) -> None:
        self.last_step = step.number
        for index, rule in enumerate(self.rules):
            if index in self.errors:
                continue
            try:
                rule.see(step)
            except Exception as error:  # a rule may come from a user; one that fails must not silence the others
                self.errors[index] = f"the rule failed at step {step.number} ({type(error).__name__}: {error})"

    def answers(self) -> list[Answer]:
        answers: list[Answer] = []
        for index, rule in enumerate(self.rules):
            try:
                answers.append(NotEvaluated(self.errors[index]) if index in self.errors else rule.answer())
            except Exception as error:  # as above
                answers.append(NotEvaluated(f"the rule failed ({type(error).__name__}: {error})"))
        return answers


def in_order(findings: Sequence[Finding], explains: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Roots first, the gravest and then the earliest before the others; after each what follows from it, with
    `consequence_of` in its evidence."""
    causes = {id(finding): _cause(finding, findings, explains) for finding in findings}
    roots = [finding for finding in findings if causes[id(finding)] is None]
    ordered: list[Finding] = []
    for root in sorted(roots, key=_weight):
        ordered.append(root)
        mine = [finding for finding in findings if causes[id(finding)] is root]
        ordered += [replace(f, evidence={**f.evidence, "consequence_of": root.rule}) for f in sorted(mine, key=_weight)]
    return ordered


def _cause(finding: Finding, findings: Sequence[Finding], explains: Mapping[str, Sequence[str]]) -> Finding | None:
    """The root that this finding follows from; None where it is a root itself."""
    seen = {finding.rule}
    root: Finding | None = None
    current = finding
    while True:
        above = [f for f in findings if f.rule not in seen and _explains(f, current, explains)]
        if not above:
            return root
        root = current = min(above, key=_weight)
        seen.add(root.rule)


def _explains(cause: Finding, effect: Finding, explains: Mapping[str, Sequence[str]]) -> bool:
    if effect.rule not in explains.get(cause.rule, ()):
        return False
    if cause.severity is Severity.INFO and effect.severity is not Severity.INFO:
        return False  # what is only mentioned is not what is wrong
    if cause.rule not in explains.get(effect.rule, ()):
        return True
    # Each could explain the other: what came first is the cause.
    return cause.step < effect.step or (cause.step == effect.step and cause.rule < effect.rule)


def _weight(finding: Finding) -> tuple[int, int, str]:
    return -finding.severity.rank, finding.step, finding.rule
