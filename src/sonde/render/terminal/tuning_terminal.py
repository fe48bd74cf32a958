"""The result of `sonde tune` for a terminal: every change that was tried, what to change, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sonde.formatting import counted, milliseconds, number, percent, rate
from sonde.render.terminal.print_to_terminal import Part, line, paragraph

if TYPE_CHECKING:
    from sonde.tuning.tuning_result import MeasuredChange, Tuning

INDENT = 12
BUSY = 0.5  # of a core's time for every core: then what is measured is also what others do
TRIALS_PER_CHANGE = 3  # measured on several scripts
MARKS = {
    "recommended": ("✓", "+", "bold green"), "departs": ("!", "!", "bold yellow"), "other": ("≠", "#", "bold yellow"),
    "noise": ("·", ".", "dim"), "slower": ("↓", "-", "dim"), "failed": ("✗", "x", "dim"),
}  # fmt: skip


class TerminalTuning:
    """The result of `sonde tune` for a rich console."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _head(self.tuning, options)
        for measured in (*self.tuning.results, *self.tuning.together):
            yield from _row(measured, options)
        if self.tuning.results:
            yield line()
        yield from _advice(self.tuning, options)
        yield from _foot(self.tuning, options)


class TuningPlan:
    """What `sonde tune --dry-run` prints: the changes that would be tried."""

    def __init__(self, script: str, families: Mapping[str, str], limit_s: float) -> None:
        self.script, self.families, self.limit_s = script, families, limit_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield line(("would try, on the first steps of ", ""), (self.script, "bold"))
        for name, what in self.families.items():
            yield from paragraph(what, options.max_width, label=(f"  {name}", "bold"), indent=18)
        text = (
            "The script is started once unchanged, to find which of these apply; then once per change, several times for changes that "
            f"help, and unchanged in between, for {self.limit_s:.0f} s at most. Each time it is stopped after a few steps."
        )
        yield from paragraph(text, options.max_width, style="dim")


def _head(tuning: Tuning, options: ConsoleOptions) -> Iterator[Text]:
    base = tuning.baseline
    parts = [f"{milliseconds(base.step_ms)} ms per step"]
    if base.samples_per_s:
        parts += [f"{rate(base.samples_per_s)} samples/s", f"{percent(base.waiting_share)} of the time waiting for data"]
    yield from paragraph(", ".join(parts), options.max_width, label=("unchanged", "bold"), indent=INDENT)
    again = f"; from one to the next they differ by {percent(base.noise_share)}" if base.num_runs > 1 else ""
    text = f"{counted(base.num_runs, 'run')} of {counted(base.num_steps, 'step')}{' each' if base.num_runs > 1 else ''}{again}"
    yield from paragraph(text, options.max_width, indent=INDENT, style="dim")
    yield line()


def _row(measured: MeasuredChange, options: ConsoleOptions) -> Iterator[Text]:
    mark, plain, style = MARKS[measured.standing]
    gain = "failed" if measured.gain is None else f"{measured.gain.factor:.2f}x"
    label: Part = (f"{plain if options.ascii_only else mark} {gain}", style)
    quiet = "" if measured.standing in ("recommended", "departs", "other") else "dim"
    changes = " + ".join(proposal.change for proposal in measured.proposals)
    yield from paragraph(changes, options.max_width, label=label, indent=INDENT, style=quiet)
    yield from paragraph(_facts(measured), options.max_width, indent=INDENT, style="dim")


def _facts(measured: MeasuredChange) -> str:
    if measured.gain is None:
        return measured.error
    gain = measured.gain
    runs = f"{gain.low:.2f} to {gain.high:.2f} in {gain.num_runs} runs" if gain.num_runs > 1 else "measured once"
    words = {"noise": "within the noise", "slower": "slower"}.get(measured.standing, "")
    facts = [words, runs, _loss(measured) if measured.same_training else "by samples per second; another training"]
    if measured.start_s >= 1:
        sure = measured.pays_off_after and measured.standing in ("recommended", "departs")
        paid = f", paid back after {counted(measured.pays_off_after, 'step')}" if sure else ""
        facts.append(f"{number(measured.start_s)} s to compile{paid}")
    if len(measured.proposals) == 1:
        facts.append(measured.proposals[0].site.line)
    return ", ".join(fact for fact in facts if fact)


def _loss(measured: MeasuredChange) -> str:
    check = measured.loss
    if check.kind == "same":
        return "loss the same bit for bit"
    if check.kind == "close":
        return f"loss within {percent(check.difference).removeprefix('< ')}"
    if check.kind == "departs":
        words = "THE LOSS DEPARTS" if measured.standing == "departs" else "the loss departs"
        return f"{words} from step {check.step} on, by up to {percent(check.difference)}"
    return "loss not compared"


def _advice(tuning: Tuning, options: ConsoleOptions) -> Iterator[Text]:
    best = tuning.recommended
    if best is None or best.gain is None:
        yield from paragraph(_nothing(tuning), options.max_width, style="bold")
        return
    now = tuning.baseline.step_ms
    yield from paragraph(
        f"{best.gain.factor:.2f} times as fast, measured: {milliseconds(now)} ms per step become {milliseconds(now / best.gain.factor)}.",
        options.max_width, label=("CHANGE" if options.ascii_only else "✎ change", "bold green"), indent=INDENT, style="bold",
    )  # fmt: skip
    for proposal in best.proposals:
        label: Part = (f"  {proposal.site.line}  ", "cyan")
        indent = max(len(label[0]), INDENT)
        if proposal.site.text:
            yield from paragraph(proposal.site.text, options.max_width, label=label, indent=indent)
            label = ("", "")
        yield from paragraph(proposal.change, options.max_width, label=label, indent=indent, style="green")
        if proposal.note:
            yield from paragraph(proposal.note, options.max_width, indent=indent, style="dim")


def _nothing(tuning: Tuning) -> str:
    if tuning.results:
        return f"Nothing that was tried{' so far' if tuning.stopped else ''} makes this training faster beyond the noise."
    if tuning.stopped == "time":
        return "There was time to run the unchanged script, and for no change."
    return "You stopped it before any change was measured." if tuning.stopped else "There is nothing to try here."


def _foot(tuning: Tuning, options: ConsoleOptions) -> Iterator[Text]:
    yield line()
    notes = [("no case", f"{family}: {why}") for family, why in tuning.not_applicable.items()]
    if tuning.untried:
        notes.append(("untried", ", ".join(tuning.untried)))
    if tuning.stopped == "time":
        trial_s = tuning.elapsed_s / max(tuning.num_trials, 1)
        minutes = -(-trial_s * TRIALS_PER_CHANGE * (len(tuning.results) + len(tuning.untried)) // 60)
        hint = f"a run takes {trial_s:.0f} s here; for everything try --time-limit {60 * max(minutes, 1):.0f}"
        notes.append(("cut short", f"the limit was reached before everything was measured as often as it should be; {hint}"))
    elif tuning.stopped:
        notes.append(("cut short", "by you; the table has what was measured until then, some of it less often than it should be"))
    if tuning.baseline.loss_noise_share:
        share = percent(tuning.baseline.loss_noise_share)
        notes.append(("losses", f"the script's own losses differ by {share} from run to run, although every run starts from the same seed"))
    if tuning.load_per_core > BUSY:
        notes.append(("busy", "other programs used this machine; on an idle one the numbers are more precise"))
    notes.append(("trials", f"{tuning.num_trials} in {tuning.elapsed_s:.0f} s; what the script printed is in {tuning.folder}"))
    for name, text in notes:
        yield from paragraph(text, options.max_width, label=(name, "dim"), indent=INDENT, style="dim")
