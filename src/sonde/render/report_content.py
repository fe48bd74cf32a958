"""What every rendering of a report shows: one sentence on the run, its curves, its notes, and the findings grouped by root cause."""

from collections.abc import Mapping, Sequence

from sonde.events import Finding
from sonde.formatting import counted, layer_name, listing, shorten
from sonde.report import Report

CONSEQUENCE = "consequence_of"
SOURCE, SOURCE_TEXT = "source", "source_text"
SHOWN_ELSEWHERE = frozenset({CONSEQUENCE, SOURCE, SOURCE_TEXT})  # evidence that has its own place in every rendering

MAX_MESSAGE = 200  # characters of an exception

ENDINGS = {
    "finished": "finished",
    "running": "still running",
    "killed": "killed: it has no end in the log and its process is gone",
    "interrupted": "interrupted by the user",
    "unknown": "no end in the log; it may still run on another machine",
}


def run_sentence(report: Report) -> str:
    """Number of steps, models and optimizers, and how the run ended, in one line."""
    run, models = report.run, _models_and_optimizers(report)
    of = f" of {models}" if models else ""
    ranks = f" on {run.num_ranks} ranks" if run.num_ranks > 1 else ""
    sentence = f"{counted(run.num_steps, 'step')}{of}{ranks}, {ending(report)}"
    why = report.why_unknown or report.why_nothing_found
    return f"{why} {sentence}" if why else sentence


def ending(report: Report) -> str:
    run = report.run
    if run.ended == "exception":
        return f"ended by {one_line(run.exception)}" if run.exception else "ended by an exception"
    if run.ended == "exit":
        return f"left with exit code {run.exit_code}" if run.exit_code else "finished"
    if run.signal:
        return f"killed by {run.signal}"
    return ENDINGS.get(run.ended, run.ended)


def one_line(text: str) -> str:
    """A message of several lines in one, shortened: the traceback has all of it."""
    return shorten(" ".join(text.split()), MAX_MESSAGE)


def loss_series(report: Report) -> tuple[list[int], list[float]]:
    return [step for step, _ in report.run.loss], [loss for _, loss in report.run.loss]


def rate_series(report: Report) -> tuple[list[int], list[float]]:
    """Steps and learning rates; empty where the rate never changes."""
    return [step for step, _ in report.run.rate], [rate for _, rate in report.run.rate]


def notes(report: Report) -> list[tuple[str, str]]:
    """Name and text of each note: what was not evaluated, not observed or not readable, and the overhead."""
    names = listing([row.rule for row in report.not_evaluated])
    not_evaluated = f", {len(report.not_evaluated)} not evaluated: {names}" if names else ""
    recorded = [("recorded", f"session.{tool}: {sentence}") for tool, sentence in report.records]
    rows = [*report.run.summary, *recorded, ("rules", f"{len(report.clear)} clear{not_evaluated}")]
    for name, unobserved in (("unobserved", report.unobserved), ("retired", report.retired)):
        if unobserved:
            reasons = listing(list(dict.fromkeys(row.reason for row in unobserved)), 2)
            rows.append((name, f"{listing([row.where or 'the run' for row in unobserved])}: {reasons}"))
    if report.verdict == "problems" and report.unseen:  # else it is beside the verdict
        rows.append(("not seen", " ".join(report.unseen)))
    if report.damage:
        rows.append(("damage", listing(list(report.damage), 2)))
    rows += [("cost", _overhead(report)), ("run", str(report.run.path))]
    return [(name, text) for name, text in rows if text]


def group_findings(findings: Sequence[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """(root cause, its consequences), in the report's order. A consequence whose cause is missing is a group of its own."""
    groups: list[tuple[Finding, list[Finding]]] = []
    for finding in findings:
        cause = finding.evidence.get(CONSEQUENCE)
        consequences = next((members for root, members in groups if root.rule == cause), None)
        if consequences is None:
            groups.append((finding, []))
        else:
            consequences.append(finding)
    return groups


def place(finding: Finding, report: Report) -> str:
    """The layer or parameter of a finding, a numbered layer with its class; empty where it concerns the whole run."""
    return layer_name(finding.where, report.run.layer_types.get(finding.where, ""))


def in_place(finding: Finding, report: Report) -> str:
    """` in layer 4 (Linear)`; empty where it concerns the whole run."""
    return f" in {place(finding, report)}" if finding.where else ""


def source_line(finding: Finding) -> tuple[str, str] | None:
    """(file and line, the code there) of a finding that names its source."""
    if SOURCE not in finding.evidence:
        return None
    return str(finding.evidence[SOURCE]), str(finding.evidence.get(SOURCE_TEXT, "")).strip()


def evidence(finding: Finding) -> dict[str, float | str]:
    """The evidence for a table: `num_nan` reads `num nan`. A name with blanks is worded already, and may hold a path."""
    shown = {name: given for name, given in finding.evidence.items() if name not in SHOWN_ELSEWHERE}
    return {name if " " in name else name.replace("_", " "): given for name, given in shown.items()}


def _models_and_optimizers(report: Report) -> str:
    models = [f"{model.get('class', 'model')} ({_parameter_count(model)})" for model in report.run.models]
    optimizers = [str(optimizer.get("class", "optimizer")) for optimizer in report.run.optimizers]
    return " with ".join(part for part in (listing(models), listing(optimizers)) if part)


def _parameter_count(model: Mapping[str, object]) -> str:
    """Of all parameters; those without gradients, such as an average of the others, are counted apart."""
    num_parameters, num_trainable = model.get("num_parameters"), model.get("num_trainable")
    if not isinstance(num_parameters, int):
        return "parameters unknown"
    if isinstance(num_trainable, int) and 0 < num_trainable < num_parameters:
        return f"{_amount(num_trainable)} parameters and {_amount(num_parameters - num_trainable)} without gradients"
    return f"{_amount(num_parameters)} parameter{'s' * (num_parameters != 1)}"


def _amount(num: int) -> str:
    if num < 10_000:
        return f"{num:,}"
    scale, unit = next((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if num >= s)
    return f"{num / scale:.3g}{unit}"


def _overhead(report: Report) -> str:
    cost = str(report.overhead)
    hint = "; docs/guide/cost.md: what to switch off" if report.overhead.is_much else ""
    return f"{cost}; {report.overhead.num_observed:,} of {counted(report.run.num_steps, 'step')} observed{hint}" if cost else ""
