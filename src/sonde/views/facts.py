"""The sentences about a run that all views share. They say what the report holds and judge nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sonde.rules.words import listing
from sonde.views.numbers import counted, percent

if TYPE_CHECKING:
    from sonde.report import Report

SHORT_MS = 1000.0  # below it the time itself is said, not only its share

ENDINGS = {
    "finished": "finished",
    "running": "still running",
    "killed": "killed: it has no end in the log and its process is gone",
    "interrupted": "interrupted by the user",
    "unknown": "no end in the log; it may still run on another machine",
}


def story(report: Report) -> str:
    """How far it got, what was watched and how it ended, in one line."""
    run = report.run
    models = subject(report)
    of = f" of {models}" if models else ""
    ranks = f" on {run.num_ranks} ranks" if run.num_ranks > 1 else ""
    told = f"{counted(run.num_steps, 'step')}{of}{ranks}, {ending(report)}"
    return f"{report.why_unknown} ({told})" if report.why_unknown else told


def ending(report: Report) -> str:
    """How the run came to its end."""
    run = report.run
    if run.ended == "exception":
        return f"ended by {run.exception}" if run.exception else "ended by an exception"
    if run.ended == "exit":
        return f"left with exit code {run.exit_code}" if run.exit_code else "finished"
    if run.signal:
        return f"killed by {run.signal}"
    return ENDINGS.get(run.ended, run.ended)


def loss_series(report: Report) -> tuple[list[int], list[float]]:
    """Steps and losses, as thinned by the report."""
    return [step for step, _ in report.run.loss], [loss for _, loss in report.run.loss]


def rate_series(report: Report) -> tuple[list[int], list[float]]:
    """The same of the learning rate; empty where it never changes."""
    return [step for step, _ in report.run.rate], [rate for _, rate in report.run.rate]


def subject(report: Report) -> str:
    """The models and optimizers that were seen."""
    models = [f"{model.get('class', 'model')} ({_millions(model.get('num_parameters'))})" for model in report.run.models]
    optimizers = [str(optimizer.get("class", "optimizer")) for optimizer in report.run.optimizers]
    return " with ".join(part for part in (listing(models), listing(optimizers)) if part)


def notes(report: Report) -> list[tuple[str, str]]:
    """Everything that a reader must know beside the findings: what was not evaluated, not seen, not read, and the cost."""
    told = [*report.run.told, ("rules", _rules(report))]
    for name, rows in (("unobserved", report.unobserved), ("retired", report.retired)):
        if rows:
            reasons = listing(list(dict.fromkeys(row.reason for row in rows)), 2)
            told.append((name, f"{listing([row.where or 'the run' for row in rows])}: {reasons}"))
    if report.damage:
        told.append(("damage", listing(list(report.damage), 2)))
    told += [("cost", _cost(report)), ("run", str(report.run.path))]
    return [(name, text) for name, text in told if text]


def _rules(report: Report) -> str:
    if not report.not_evaluated:
        return f"{len(report.clear)} clear"
    names = listing([row.rule for row in report.not_evaluated])
    return f"{len(report.clear)} clear, {len(report.not_evaluated)} not evaluated: {names}"


def _cost(report: Report) -> str:
    if not math.isfinite(report.overhead.ratio):
        return ""
    steps = f"{report.overhead.num_observed:,} of {counted(report.run.num_steps, 'step')} observed"
    own_ms = report.overhead.own_ms
    took = f"{own_ms:.0f} ms, " if own_ms < SHORT_MS else ""  # of a run this short, the share alone would mislead
    return f"Sonde took {took}{percent(report.overhead.ratio - 1)} of the training time; {steps}"


def _millions(num_parameters: object) -> str:
    if not isinstance(num_parameters, int):
        return "parameters unknown"
    if num_parameters < 10_000:
        return counted(num_parameters, "parameter")
    scale, unit = next((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if num_parameters >= s)
    return f"{num_parameters / scale:.3g}{unit} parameters"
