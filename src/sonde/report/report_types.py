"""Report: what is wrong with a run, why, and what could not be evaluated.

A report is a value that the renderers draw. It is computed from the log at each reading, so better rules improve old runs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sonde.events import Finding
from sonde.formatting import counted, layer_name, strict
from sonde.report.own_cost import Overhead

SCHEMA = 1
MAX_POINTS = 200  # of a curve: more than any renderer has columns

Verdict = Literal["healthy", "nothing_found", "problems", "unknown"]
"""`nothing_found`: no rule found anything, but the training crashed or its loss did not move. `unknown`: too little was seen to judge."""


def verdict_words(verdict: str) -> str:
    """A verdict for people: `nothing found`."""
    return verdict.replace("_", " ")


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
    why_nothing_found: str = ""  # empty if the verdict is not "nothing_found"
    unseen: tuple[str, ...] = ()  # what the training had and the run does not show, with which it would not be called healthy

    @property
    def exit_code(self) -> int:
        """For programs: 0 healthy or nothing found, 1 problems, 3 unknown."""
        return {"healthy": 0, "nothing_found": 0, "problems": 1, "unknown": 3}[self.verdict]

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """A few lines of plain text: the verdict, the findings, and what was not observed."""
        run = self.run
        end = f"{run.ended}{f' by {run.signal}' if run.signal else ''}"
        lines = [f"{verdict_words(self.verdict)}: {run.name}, {counted(run.num_steps, 'step')}, {end}"]
        lines += [text for text in (self.why_unknown, self.why_nothing_found) if text]
        lines += [f"session.{tool}: {sentence}" for tool, sentence in self.records]
        lines += [f"{word}: {sentence}" for word, sentence in run.summary if word in ("stopped", "sampling")]
        for finding in self.findings:
            follows = finding.evidence.get("consequence_of")
            place = f" at {layer_name(finding.where, run.layer_types.get(finding.where, ''))}" if finding.where else ""
            head = f"{finding.severity} {finding.rule}{place}, step {finding.step}: {finding.cause}"
            lines += [f"  follows: {head}"] if follows else [head, f"  fix: {finding.fix}"]
        if self.verdict == "problems":
            lines += [f"not seen: {sentence}" for sentence in self.unseen]
        lines += [f"not observed: {each.where or 'the run'}: {each.reason}" for each in self.unobserved]
        lines += [f"disabled probe: {each.where}: {each.reason}" for each in self.retired]
        if self.not_evaluated:
            had = "rule had" if len(self.not_evaluated) == 1 else "rules had"
            lines.append(f"{len(self.not_evaluated)} {had} nothing to look at: `sonde diagnose -v`")
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
            "why_nothing_found": self.why_nothing_found,
            "unseen": list(self.unseen),
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
