"""Report: what is wrong with a run, why, and what could not be evaluated.

A report is a value that the renderers draw. It is computed from the log at each reading, so better rules improve old runs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sonde.events import Finding
from sonde.formatting import layer_name, strict
from sonde.report.own_cost import Overhead

SCHEMA = 1
MAX_POINTS = 200  # of a curve: more than any renderer has columns

Verdict = Literal["healthy", "problems", "unknown"]


@dataclass(frozen=True, slots=True)
class Unevaluated:
    """A rule that could not be evaluated."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unobserved:
    """Something that could not be measured, or a probe that was disabled because it failed."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about the run itself."""

    name: str
    path: Path
    num_steps: int
    last_step: int
    ended: str  # finished | exception | exit | interrupted | running | killed | unknown
    exit_code: int | None
    exception: str
    num_ranks: int
    models: tuple[Mapping[str, Any], ...]  # the data of the `model` events
    optimizers: tuple[Mapping[str, Any], ...]  # the data of the `optimizer` events
    loss: tuple[tuple[int, float], ...]  # step and value, thinned to at most MAX_POINTS; non-finite values are kept
    rate: tuple[tuple[int, float], ...] = ()  # the learning rate, if it changes
    summary: tuple[tuple[str, str], ...] = ()  # how the training went: a word and a sentence each
    signal: str = ""  # of a run that was killed, if it is known: "SIGILL (illegal instruction)"
    layer_types: Mapping[str, str] = field(default_factory=dict)  # class by path of the modules that findings name


@dataclass(frozen=True, slots=True)
class Report:
    """The diagnosis of one run."""

    run: RunFacts
    verdict: Verdict
    why_unknown: str  # empty if the verdict is not "unknown"
    findings: tuple[Finding, ...]  # the most likely root cause first; see evidence "consequence_of"
    clear: tuple[str, ...]  # rules that had what they need and found nothing
    not_evaluated: tuple[Unevaluated, ...]
    overhead: Overhead
    unobserved: tuple[Unobserved, ...]
    retired: tuple[Unobserved, ...]
    damage: tuple[str, ...]  # bytes that could not be read, steps that could not be written: one sentence each
    records: tuple[tuple[str, str], ...] = ()  # tools of the session that hold records: name and one sentence each

    @property
    def exit_code(self) -> int:
        """For programs: 0 healthy, 1 problems, 3 unknown."""
        return {"healthy": 0, "problems": 1, "unknown": 3}[self.verdict]

    def summary(self) -> str:
        """A few lines of plain text."""
        run = self.run
        lines = [f"{self.verdict}: {run.name}, {run.num_steps} steps, {run.ended}{f' by {run.signal}' if run.signal else ''}"]
        lines += [f"{word}: {sentence}" for word, sentence in run.summary]
        if self.why_unknown:
            lines.append(self.why_unknown)
        lines += [f"session.{tool}: {sentence}" for tool, sentence in self.records]
        for finding in self.findings:
            follows = finding.evidence.get("consequence_of")
            place = f" at {layer_name(finding.where, run.layer_types.get(finding.where, ''))}" if finding.where else ""
            head = f"{finding.severity} {finding.rule}{place}, step {finding.step}: {finding.cause}"
            lines += [f"  follows: {head}"] if follows else [head, f"  fix: {finding.fix}"]
        if self.not_evaluated:
            lines.append(f"not evaluated: {', '.join(one.rule for one in self.not_evaluated)}")
        if cost := str(self.overhead):
            lines.append(f"{cost}; {self.overhead.num_observed} steps observed")
        lines += self.damage
        return "\n".join(lines)

    def to_json(self, *, indent: int | None = 1) -> str:
        """One strict JSON document of schema 1; a number that is not finite is the string "NaN", "Infinity" or "-Infinity".

        Args:
            indent: Blanks per level; None gives a single line.
        """
        document = {
            "schema": SCHEMA,
            "run": self.run.name,
            "verdict": self.verdict,
            "why_unknown": self.why_unknown,
            "findings": [
                {
                    "rule": finding.rule,
                    "severity": str(finding.severity),
                    "where": finding.where,
                    "step": finding.step,
                    "cause": finding.cause,
                    "fix": finding.fix,
                    "evidence": dict(finding.evidence),
                }
                for finding in self.findings
            ],
            "not_evaluated": [{"rule": one.rule, "reason": one.reason} for one in self.not_evaluated],
            "overhead": asdict(self.overhead),
            "unobserved": [{"where": one.where, "reason": one.reason} for one in self.unobserved],
            "retired": [{"where": one.where, "reason": one.reason} for one in self.retired],
            "damage": list(self.damage),
            "steps": self.run.num_steps,
            "ended": self.run.ended,
            "signal": self.run.signal,
            "told": dict(self.run.summary),
            "records": dict(self.records),
        }
        return json.dumps(strict(document), indent=indent, allow_nan=False)
