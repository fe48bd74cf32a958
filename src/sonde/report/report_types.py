"""Report: what is wrong with a run, why, and what could not be evaluated.

A report is a value that the renderers draw. It is computed from the log at each reading, so better rules improve old runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from sonde.events import Finding
from sonde.formatting import counted, layer_name, number, strict

SCHEMA = 1
SHORT_S = 60.0  # of training: below, the share that Sonde took is mostly its start
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
class Overhead:
    """What watching cost the training."""

    ratio: float  # time of the training with Sonde over the time without; NaN if no times were recorded
    num_observed: int  # steps in which every tensor was measured
    observed_share: float  # of all steps
    own_ms: float = float("nan")  # time of Sonde in all steps of all ranks
    training_s: float = float("nan")  # time of all steps of the lowest rank
    startup_ms: float = float("nan")  # time of Sonde in the first steps beyond that of usual steps: hooks, buffers, first files
    per_step_ms: float = float("nan")  # time of Sonde in a usual step: the median

    def __str__(self) -> str:
        """What watching cost, as a sentence; empty if no times were recorded. A share says little about a short training, whose start
        has to be paid only once."""
        if not isfinite(self.ratio):
            return ""
        if self.training_s < SHORT_S and isfinite(self.per_step_ms):
            return f"Sonde took {_two_digits(self.startup_ms)} ms to start and {_two_digits(self.per_step_ms)} ms per step"
        return f"Sonde took {_two_digits(100 * (self.ratio - 1))} % of the training time"


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
    why_nothing_found: str = ""  # empty if the verdict is not "nothing_found"
    unseen: tuple[str, ...] = ()  # what the training had and the run does not show, with which it would not be called healthy

    @property
    def exit_code(self) -> int:
        """For programs: 0 healthy or nothing found, 1 problems, 3 unknown."""
        return {"healthy": 0, "nothing_found": 0, "problems": 1, "unknown": 3}[self.verdict]

    def summary(self) -> str:
        """A few lines of plain text: the verdict, the findings, and what was not observed."""
        run = self.run
        end = f"{run.ended}{f' by {run.signal}' if run.signal else ''}"
        lines = [f"{verdict_words(self.verdict)}: {run.name}, {counted(run.num_steps, 'step')}, {end}"]
        lines += [text for text in (self.why_unknown, self.why_nothing_found) if text]
        lines += [f"{word}: {sentence}" for word, sentence in run.summary if word == "stopped"]
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
            "overhead": {
                "ratio": self.overhead.ratio,
                "own_ms": self.overhead.own_ms,
                "num_observed": self.overhead.num_observed,
                "observed_share": self.overhead.observed_share,
            },
            "unobserved": [{"where": one.where, "reason": one.reason} for one in self.unobserved],
            "retired": [{"where": one.where, "reason": one.reason} for one in self.retired],
            "damage": list(self.damage),
            "steps": self.run.num_steps,
            "ended": self.run.ended,
            "signal": self.run.signal,
            "told": dict(self.run.summary),
        }
        return json.dumps(strict(document), indent=indent, allow_nan=False)


def _two_digits(value: float) -> str:
    return number(float(f"{value:.2g}"))
