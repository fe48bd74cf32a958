"""judge(run) -> Report: what is wrong with a run, why, and what could not be told.

A `Report` is a value. Views draw it and compute nothing; it is made anew whenever a run is read, so better rules
improve old runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from sonde.events import Event, Finding, Kind, Severity, Step
from sonde.rules import RULES
from sonde.rules.activity import Activity
from sonde.rules.engine import Engine, in_order
from sonde.rules.learning import losses
from sonde.rules.rule import NotEvaluated, Rule
from sonde.rules.told import Told
from sonde.rules.words import number
from sonde.runlog.format import Gap
from sonde.runlog.reader import Run

SCHEMA = 1
MAX_POINTS = 200  # of a curve: more than any view has columns
MAX_LOGGED = 50  # series of the user's that are looked through
MAX_NOTES = 50  # things that could not be observed or read: a list that long is read by nobody

Verdict = Literal["healthy", "problems", "unknown"]


@dataclass(frozen=True, slots=True)
class Unevaluated:
    """A rule that could not tell."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unobserved:
    """Something that could not be measured, or a probe that was taken out because it failed."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Overhead:
    """What watching cost the training."""

    ratio: float  # time of the training with Sonde over the time without; NaN where no times were taken
    num_observed: int  # steps whose every tensor was measured
    observed_share: float  # of all steps
    own_ms: float = float("nan")  # Sonde's time in all, over all ranks: a large share of a very short run is little time


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a view says about the run itself."""

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
    loss: tuple[tuple[int, float], ...]  # step and value, thinned to at most MAX_POINTS; what is not finite is kept
    rate: tuple[tuple[int, float], ...] = ()  # the learning rate, where it changes
    told: tuple[tuple[str, str], ...] = ()  # how it went: a word and a sentence each
    signal: str = ""  # of a run that was killed, where it is known: "SIGILL (illegal instruction)"


@dataclass(frozen=True, slots=True)
class Report:
    """The judgement on one run."""

    run: RunFacts
    verdict: Verdict
    why_unknown: str  # empty where the verdict is not "unknown"
    findings: tuple[Finding, ...]  # the most likely root cause first; see evidence "consequence_of"
    clear: tuple[str, ...]  # rules that had what they need and found nothing
    not_evaluated: tuple[Unevaluated, ...]
    overhead: Overhead
    unobserved: tuple[Unobserved, ...]
    retired: tuple[Unobserved, ...]
    damage: tuple[str, ...]  # bytes that could not be read, steps that could not be written: one sentence each

    @property
    def exit_code(self) -> int:
        return 1 if self.verdict == "problems" else 0

    def summary(self) -> str:
        """A few lines of plain text."""
        run = self.run
        lines = [f"{self.verdict}: {run.name}, {run.num_steps} steps, {run.ended}{f' by {run.signal}' if run.signal else ''}"]
        lines += [f"{word}: {sentence}" for word, sentence in run.told]
        if self.why_unknown:
            lines.append(self.why_unknown)
        for finding in self.findings:
            follows = finding.evidence.get("consequence_of")
            place = f" at {finding.where}" if finding.where else ""
            head = f"{finding.severity} {finding.rule}{place}, step {finding.step}: {finding.cause}"
            lines += [f"  follows: {head}"] if follows else [head, f"  fix: {finding.fix}"]
        if self.not_evaluated:
            lines.append(f"not evaluated: {', '.join(one.rule for one in self.not_evaluated)}")
        if isfinite(self.overhead.ratio):
            cost = number(100 * (self.overhead.ratio - 1))
            lines.append(f"Sonde cost {cost} % of the training time; {self.overhead.num_observed} steps observed")
        lines += self.damage
        return "\n".join(lines)

    def to_json(self) -> str:
        """One strict JSON document of schema 1; what is not finite is the string "NaN", "Infinity" or "-Infinity"."""
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
            "told": dict(self.run.told),
        }
        return json.dumps(strict(document), indent=1, allow_nan=False)


def judge(run: Run | Path | str, rules: Sequence[type[Rule]] = RULES) -> Report:
    """What is wrong with a run. Reads it once, from beginning to end."""
    source = run if isinstance(run, Run) else Run(run)
    engine, facts = Engine(rules), _Facts()
    for step in _all_steps(source):
        facts.see(step)
        engine.see(step)
    outcomes = engine.outcomes()
    found = [f for one in outcomes if isinstance(one.answer, Sequence) for f in one.answer]
    explains = {rule.name: rule.explains for rule in rules}
    findings = in_order(found, explains)
    unevaluated = tuple(
        Unevaluated(one.rule.name, one.answer.reason) for one in outcomes if isinstance(one.answer, NotEvaluated)
    )
    clear = tuple(
        one.rule.name for one in outcomes if not isinstance(one.answer, (NotEvaluated, Sequence)) or one.answer == []
    )
    verdict, why = _verdict(findings, facts, len(outcomes) == len(unevaluated), source)
    return Report(
        run=_run_facts(source, facts),
        verdict=verdict,
        why_unknown=why,
        findings=tuple(findings),
        clear=clear,
        not_evaluated=unevaluated,
        overhead=facts.overhead(),
        unobserved=_notes(source, "unobserved", "reason"),
        retired=_notes(source, "retired", "error"),
        damage=_damage(source),
    )


def _all_steps(run: Run) -> Iterator[Step]:
    """The complete steps, then, per rank, what happened after the last of them: a run may die of what a rule looks
    for."""
    last: dict[int, Step] = {}
    for step in run.steps():
        last[step.rank] = step
        yield step
    newest = {process.rank: process for process in run.processes}
    for rank in run.ranks:
        ended = last.get(rank)
        after = ended.number if ended else -1
        fatal = newest[rank].fatal_signal
        if fatal is not None and fatal.step <= after:  # a further attempt that died before its first step: judged by itself
            yield Step(fatal.step, rank, {}, {}, (fatal,), newest[rank].sites)
            continue
        # That it ended says nothing of a training that had no step.
        events = tuple(event for event in run.events(rank=rank) if event.step > after and (ended or event.kind != "end"))
        events += (fatal,) if fatal is not None else ()
        if events:
            sites = ended.sites if ended else run.sites
            yield Step(max(event.step for event in events), rank, {}, {}, events, sites)


def _verdict(findings: Sequence[Finding], facts: _Facts, nothing_evaluated: bool, run: Run) -> tuple[Verdict, str]:
    if any(finding.severity.rank >= Severity.WARNING.rank for finding in findings):
        return "problems", ""
    if not facts.num_steps and run.gaps:
        return "unknown", f"What Sonde saw could not be written ({run.gaps[0].reason}), so there is nothing to judge."
    if not facts.activity.totals["backwards"] and not facts.activity.updates:
        return "unknown", "Sonde saw no training: no optimizer stepped and no backward ran."
    if not facts.activity.updates and not facts.num_models:
        return "unknown", "Backward ran, but Sonde saw neither a torch.nn.Module nor an optimizer to watch."
    if not facts.activity.updates:
        return "unknown", "Nothing was trained: backward ran, but no optimizer stepped and no parameter was changed."
    if nothing_evaluated:
        return "unknown", "No rule had enough to judge by."
    return "healthy", ""


@dataclass(slots=True)
class _Curve:
    """A series in at most MAX_POINTS points: when they are full, every second is left out, but nothing that is not finite."""

    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    pending: int = 0  # values in the newest point

    def see(self, number: int, value: float) -> None:
        if self.pending and self.pending < self.stride:
            if isfinite(self.points[-1][1]):  # one that is not finite stands for its whole point
                self.points[-1] = (number, value)
            self.pending += 1
            return
        if len(self.points) == MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2])
            self.points = [early if not isfinite(early[1]) else late for early, late in pairs]
            self.stride *= 2
        self.points.append((number, value))
        self.pending = 1


@dataclass(slots=True)
class _Facts:
    """What a report says beside its findings, gathered in the same pass."""

    activity: Activity = field(default_factory=Activity)
    told: Told = field(default_factory=Told)
    loss: _Curve = field(default_factory=_Curve)
    rate: _Curve = field(default_factory=_Curve)
    num_observed: int = 0
    num_steps: int = 0
    num_models: int = 0
    step_ms: float = 0.0
    sonde_ms: float = 0.0
    rank: int | None = None  # the lowest: its steps are counted, its loss is drawn

    def see(self, step: Step) -> None:
        self.num_models += sum(event.kind == "model" for event in step.events)
        self.rank = step.rank if self.rank is None else self.rank
        if step.rank == self.rank:
            self.told.see(step)
        if not step.scalars:
            return
        self.activity.see(step)
        self.num_steps += step.rank == self.rank
        self.num_observed += step.rank == self.rank and step.scalar("observed", 0.0) == 1
        whole, ours = step.scalar("step_ms"), step.scalar("sonde_ms")
        if isfinite(whole) and isfinite(ours) and whole >= ours >= 0:
            self.step_ms += whole
            self.sonde_ms += ours
        found, bad = losses(step)
        if step.rank == self.rank and (found or bad):
            # A loss that is not finite is kept as it is; NaN leaves no other trace in the scalars than an event.
            infinite = [value for value in found.values() if not isfinite(value)]
            self.loss.see(step.number, next(iter(infinite or ([float("nan")] if bad else found.values()))))
        rate = step.scalar("lr")
        if step.rank == self.rank and rate == rate:
            self.rate.see(step.number, rate)

    def overhead(self) -> Overhead:
        without = self.step_ms - self.sonde_ms
        ratio = self.step_ms / without if without > 0 else float("nan")
        share = self.num_observed / self.num_steps if self.num_steps else 0.0
        return Overhead(ratio, self.num_observed, share, self.sonde_ms)


def _run_facts(run: Run, facts: _Facts) -> RunFacts:
    ended = run.ended
    rank = next(iter(run.ranks), None)
    return RunFacts(
        name=run.name,
        path=run.path,
        num_steps=facts.num_steps,
        last_step=run.last_step,
        ended=str(ended.how),
        exit_code=ended.exit_code,
        exception=str(ended.exception or ""),
        num_ranks=len(run.ranks),
        models=tuple(event.data for event in run.events("model", rank)),
        optimizers=tuple(event.data for event in run.events("optimizer", rank)),
        loss=tuple(facts.loss.points),
        rate=tuple(facts.rate.points) if len({value for _, value in facts.rate.points}) > 1 else (),
        told=tuple(facts.told.sentences(_logged(run, rank))),
        signal=ended.signal,
    )


def _logged(run: Run, rank: int | None) -> dict[str, list[tuple[int, float]]]:
    series = ((name, run.series(Kind.LOG, name, "value", rank)) for name in run.logged[:MAX_LOGGED])
    return {name: list(zip(steps.tolist(), values.tolist())) for name, (steps, values) in series}


def _notes(run: Run, kind: str, key: str) -> tuple[Unobserved, ...]:
    notes: dict[Unobserved, None] = {}
    for event in run.events(kind):
        where = " ".join(text for name in ("probe", "where") if (text := _text(event, name)))
        notes[Unobserved(where, _text(event, key))] = None
        if len(notes) >= MAX_NOTES:
            break
    return tuple(notes)


def _text(event: Event, key: str) -> str:
    return str(event.data.get(key, ""))


def _damage(run: Run) -> tuple[str, ...]:
    notes = [
        f"{one.num_bytes} bytes of {Path(one.file).name} at offset {one.offset} could not be read: {one.reason}"
        for one in run.damage
    ]
    notes += [_told_gap(gap) for gap in run.gaps]
    if len(notes) > MAX_NOTES:
        notes = [*notes[:MAX_NOTES], f"and {len(notes) - MAX_NOTES} more"]
    return tuple(notes)


def _told_gap(gap: Gap) -> str:
    steps = f"step {gap.first_step}" if gap.first_step == gap.last_step else f"steps {gap.first_step} to {gap.last_step}"
    records = f"{gap.num_dropped:,} record{'s' if gap.num_dropped != 1 else ''}" + (f" of {steps}" if gap.first_step >= 0 else "")
    return f"{records} could not be written: {gap.reason}"


def strict(value: Any) -> Any:
    """The same value in strict JSON: numbers that JSON has no word for become strings, and so does what is not JSON."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else number(value)
    return str(value)
