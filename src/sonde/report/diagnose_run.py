"""diagnose(run) -> Report: reads a run, evaluates the rules and collects the facts beside their findings.

Rules judge the newest attempt of each rank. The facts (steps, loss curve, cost) cover all attempts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sonde.events import ChildProcessesEnded, Finding, Kind, ModelWatched, RecordedWithTool, Severity, Started
from sonde.formatting import counted, listing
from sonde.report.own_cost import Overhead, measure_overhead
from sonde.report.report_types import MAX_POINTS, Report, RunFacts, Unevaluated, Unobserved, Verdict
from sonde.report.run_summary import summarize
from sonde.rules.engine import evaluate, order_findings
from sonde.rules.registry import all_rules, checked_rules
from sonde.rules.rule import NotEvaluated, Rule
from sonde.run_view import RunView, newest_views
from sonde.run_view.step_columns import power_of_two_stride
from sonde.runlog.record_format import Gap
from sonde.runlog.run_reader import Run

MAX_LOGGED = 50  # series of the user that are looked through
MAX_UNSEEN = 3  # sentences about what is missing, beside the verdict
CRASHES = frozenset({"exception", "killed"})
HOW_TO_WATCH_CHILDREN = "Child processes are not watched: call sonde.watch(model, optimizer) in the function that they run."
MAX_NOTES = 50  # things that could not be observed or read: nobody reads a longer list

Floats = npt.NDArray[np.float64]


def diagnose(run: Run | Path | str, rules: Sequence[Rule] | None = None, *, lost: str = "") -> Report:
    """What is wrong with a run.

    Args:
        run: A run, or the path of its directory or of a `.sonde` file.
        rules: The rules to evaluate; by default all rules of Sonde and of installed packages that provide some.
        lost: A sentence about records that were lost and that the run does not mention, if the caller knows of some.
    """
    source = run if isinstance(run, Run) else Run(run)
    chosen = all_rules() if rules is None else checked_rules(rules)
    views = newest_views(source)
    facts = _collect_facts(source, views)
    outcomes = evaluate(views, chosen)
    findings = order_findings(
        [finding for outcome in outcomes if isinstance(outcome.result, Sequence) for finding in outcome.result],
        {rule.name: rule.explains for rule in chosen},
    )
    not_evaluated = [(outcome.rule.name, outcome.result.reason) for outcome in outcomes if isinstance(outcome.result, NotEvaluated)]
    if _measured_nothing(views):
        not_evaluated = [(name, "nothing was measured: the mode is 'none'") for name, _ in not_evaluated]
    found = {finding.rule for finding in findings}
    unseen = _unseen(source, views, lost)
    verdict, why = _verdict(findings, facts, unseen, len(not_evaluated) == len(outcomes), source, views)
    return Report(
        run=_run_facts(source, facts, views, findings),
        verdict=verdict,
        why_unknown=why if verdict == "unknown" else "",
        findings=tuple(findings),
        clear=tuple(rule.name for rule in chosen if rule.name not in found | {name for name, _ in not_evaluated}),
        not_evaluated=tuple(Unevaluated(name, reason) for name, reason in not_evaluated),
        overhead=facts.overhead,
        unobserved=_notes(source, "unobserved", "reason"),
        retired=_notes(source, "retired", "error"),
        damage=_damage(source, facts.num_repeated_steps),
        records=_records(source),
        why_nothing_found=why if verdict == "nothing_found" else "",
        unseen=unseen,
    )


@dataclass(slots=True)
class _Facts:
    """Facts over all attempts. Steps, losses and rates are those of the lowest rank that completed a step."""

    rank: int | None = None
    num_steps: int = 0
    num_models: int = 0
    num_backwards: int = 0
    num_updates: int = 0
    num_repeated_steps: int = 0
    overhead: Overhead = field(default_factory=Overhead)
    loss: tuple[Floats, Floats] = (np.empty(0), np.empty(0))  # steps, values
    rate: tuple[Floats, Floats] = (np.empty(0), np.empty(0))


def _collect_facts(run: Run, newest: dict[int, RunView]) -> _Facts:
    trained = [process.rank for process in run.processes if process.last_step >= 0]
    facts = _Facts(rank=min(trained or run.ranks, default=None))
    judged = {id(view.process): view for view in newest.values()}  # damaged manifests may give two processes one rank and attempt
    views = [judged.get(id(process)) or RunView(process) for process in run.processes]
    facts.overhead = measure_overhead(views, facts.rank)
    for process, view in zip(run.processes, views):
        facts.num_models += len(view.events(ModelWatched))
        facts.num_backwards += view.calls["backwards"]
        facts.num_updates += view.calls.updates
        facts.num_repeated_steps += view.num_repeated_steps
        if process.rank != facts.rank:
            continue
        facts.num_steps += view.num_steps
        losses = view.losses
        # A loss that is not finite stays as it is; a NaN is known from its event only.
        values = np.where(losses.is_nonfinite & np.isfinite(losses.value), nan, losses.value)
        facts.loss = _thinned(_joined(facts.loss, view.step_numbers[losses.has_loss], values[losses.has_loss]))
        rates = view.steps["lr"]
        facts.rate = _thinned(_joined(facts.rate, view.step_numbers[~np.isnan(rates)], rates[~np.isnan(rates)]))
    return facts


def _joined(curve: tuple[Floats, Floats], steps: npt.NDArray[np.int64], values: Floats) -> tuple[Floats, Floats]:
    return np.concatenate([curve[0], steps]), np.concatenate([curve[1], values])


def _thinned(curve: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """At most MAX_POINTS points, at equal distances: each is the last of its group, or the first of it that is not finite."""
    steps, values = curve
    width = power_of_two_stride(len(values), MAX_POINTS)
    if width == 1:
        return curve
    starts = np.arange(0, len(values), width)
    chosen = np.minimum(starts + width, len(values)) - 1
    is_bad = np.flatnonzero(~np.isfinite(values))
    first_bad = np.searchsorted(is_bad, starts)
    has_bad = (first_bad < len(is_bad)) & (is_bad[np.minimum(first_bad, len(is_bad) - 1)] <= chosen if len(is_bad) else False)
    chosen[has_bad] = is_bad[first_bad[has_bad]]
    return steps[chosen], values[chosen]


def _unseen(run: Run, views: Mapping[int, RunView], lost: str) -> tuple[str, ...]:
    """What the training had and the run does not show, one sentence each."""
    sentences = [f"{lost[0].upper()}{lost[1:]}."] if lost else []
    sentences += [sentence for view in views.values() for sentence in view.unseen.values()]
    read = {segment.path.name for process in run.processes for segment in process.segments}
    unread = [name for name, size in run.log_sizes.items() if size and name not in read]
    if unread:
        sentences.append(f"{listing(unread)} could not be read at all: copy the run again, or delete the file if it is none of this run.")
    for view in views.values():
        num_steps = sum(event.num_steps for event in view.events(ChildProcessesEnded))
        if num_steps:
            sentences.append(f"{counted(num_steps, 'training step')} ran in forked child processes. {HOW_TO_WATCH_CHILDREN}")
    return tuple(dict.fromkeys(sentences))[:MAX_NOTES]


def _verdict(
    findings: Sequence[Finding], facts: _Facts, unseen: Sequence[str], is_nothing_evaluated: bool, run: Run, views: Mapping[int, RunView]
) -> tuple[Verdict, str]:
    """The verdict, and why it is "unknown" or "nothing_found"."""
    if any(finding.severity.rank >= Severity.WARNING.rank for finding in findings):
        return "problems", ""
    why = _why_unknown(facts, unseen, is_nothing_evaluated, run, views)
    if why:
        return "unknown", why
    why = _why_nothing_found(run, facts, views)
    return ("nothing_found", why) if why else ("healthy", "")


def _why_unknown(facts: _Facts, unseen: Sequence[str], is_nothing_evaluated: bool, run: Run, views: Mapping[int, RunView]) -> str:
    if not facts.num_steps and run.gaps:
        return f"The log could not be written ({run.gaps[0].reason}), so there is nothing to judge."
    if not facts.num_backwards and not facts.num_updates:
        if _records(run):
            why = "Nothing was measured: the mode is 'none'" if _measured_nothing(views) else "No training was watched"
            return f"{why}, so no rule could judge. What you recorded with the session's tools is listed here."
        return _why_no_training(views)
    if not facts.num_updates and not facts.num_models:
        return "Backward ran, but Sonde saw neither a torch.nn.Module nor an optimizer to watch."
    if not facts.num_updates:
        return "Nothing was trained: backward ran, but no optimizer stepped and no parameter was changed. Is optimizer.step() called?"
    if unseen:
        return " ".join(unseen[:MAX_UNSEEN])
    if not len(facts.loss[0]) and not _has_statistics(views):
        return f"Parameters changed, but neither a loss nor their statistics were seen{_mode(views)}."
    return "No rule had enough to judge by." if is_nothing_evaluated else ""


def _why_no_training(views: Mapping[int, RunView]) -> str:
    if _measured_nothing(views):
        return "Nothing was measured: the mode is 'none'. Choose another mode, such as full_debug, to get a verdict."
    sentence = "Sonde saw no training: no optimizer stepped and no backward ran"
    if any(view.events(ChildProcessesEnded) for view in views.values()):
        return f"{sentence} in this process, which started others. {HOW_TO_WATCH_CHILDREN}"
    return f"{sentence}."


def _measured_nothing(views: Mapping[int, RunView]) -> bool:
    return any(event.mode == "none" for view in views.values() for event in view.events(Started))


def _why_nothing_found(run: Run, facts: _Facts, views: Mapping[int, RunView]) -> str:
    ended = run.ended
    if ended.how in CRASHES or (ended.how == "exit" and ended.exit_code):
        return "The training did not run to its end."
    # A second task begins anew, above where the first one ended; far above where that one began, the training came apart in between.
    trends = [view.loss_trend for view in views.values() if view.loss_trend.has_risen or not view.loss_trend.has_fallen_at_times]
    failing = next((text for trend in trends if (text := trend.failing)), "")
    if failing:
        return f"{failing[0].upper()}{failing[1:]}."
    return "" if _has_statistics(views) else f"Neither parameters nor gradients were measured{_mode(views)}."


def _has_statistics(views: Mapping[int, RunView]) -> bool:
    return any(kind in view.layer_kinds for view in views.values() for kind in (Kind.PARAMETER, Kind.GRADIENT))


def _mode(views: Mapping[int, RunView]) -> str:
    modes = {event.mode for view in views.values() for event in view.events(Started)} - {"full_debug"}
    return f" in the mode {min(modes)!r}" if modes else ""


def _run_facts(run: Run, facts: _Facts, views: dict[int, RunView], findings: Sequence[Finding]) -> RunFacts:
    ended = run.ended
    rank = facts.rank
    view = views.get(rank) if rank is not None else None
    loss, rate = (tuple(zip(steps.astype(np.int64).tolist(), values.tolist())) for steps, values in (facts.loss, facts.rate))
    places = {finding.where for finding in findings}
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
        loss=loss,
        rate=rate if len({value for _, value in rate}) > 1 else (),
        summary=tuple(summarize(view, _logged(run, rank))) if view is not None else (),
        signal=ended.signal,
        layer_types={site.module: site.type for site in view.sites.values() if site.module in places} if view is not None else {},
    )


def _logged(run: Run, rank: int | None) -> dict[str, list[tuple[int, float]]]:
    series = ((name, run.series(Kind.LOG, name, "value", rank)) for name in run.logged[:MAX_LOGGED])
    return {name: list(zip(steps.tolist(), values.tolist())) for name, (steps, values) in series}


def _notes(run: Run, kind: str, key: str) -> tuple[Unobserved, ...]:
    notes: dict[Unobserved, None] = {}
    for event in run.events(kind):
        where = " ".join(text for name in ("probe", "where") if (text := str(event.data.get(name, ""))))
        notes[Unobserved(where, str(event.data.get(key, "")))] = None
        if len(notes) >= MAX_NOTES:
            break
    return tuple(notes)


def _records(run: Run) -> tuple[tuple[str, str], ...]:
    """The last sentence about each tool of the session."""
    last = {event.tool: event.text for event in run.events(RecordedWithTool)}
    return tuple((tool, text) for tool, text in last.items() if text)[:MAX_NOTES]


def _damage(run: Run, num_repeated_steps: int) -> tuple[str, ...]:
    notes = [
        f"{one.num_bytes} bytes of {Path(one.file).name} at offset {one.offset} could not be read: {one.reason}" for one in run.damage
    ]
    notes += [_gap_sentence(gap) for gap in run.gaps]
    if num_repeated_steps:
        notes.append(f"{num_repeated_steps:,} records repeat the number of an earlier step of the same process; the first one counts")
    if len(notes) > MAX_NOTES:
        notes = [*notes[:MAX_NOTES], f"and {len(notes) - MAX_NOTES} more"]
    return tuple(notes)


def _gap_sentence(gap: Gap) -> str:
    steps = f"step {gap.first_step}" if gap.first_step == gap.last_step else f"steps {gap.first_step} to {gap.last_step}"
    records = f"{gap.num_dropped:,} record{'s' if gap.num_dropped != 1 else ''}" + (f" of {steps}" if gap.first_step >= 0 else "")
    return f"{records} could not be written: {gap.reason}"


