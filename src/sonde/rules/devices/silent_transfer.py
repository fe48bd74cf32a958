"""A training step moves tensors between the CPU and a device that need not be moved.

What it finds    a tensor that is transferred again in every step, or several times in one, although it has not changed; one that goes to
                 the CPU and back within a step; non_blocking=True on memory that is not pinned.
Why it matters   each such copy waits: Python for all that the device still computes, then the device for Python.
How it knows     in pairs of steps, every call of your code that moves a tensor (.to(), .cuda(), .cpu(), copy_()) is recorded. The same
                 tensor is the same memory with the same version and contents (above 1 MiB, a sample of them). It is a warning if the calls
                 take a tenth of the step, including what they waited for.
Known problems   batches and weights change and are not reported, nor are activations that stay on the CPU until backward and layers with
                 weights there. Numbers that are computed anew on the CPU, without a graph, are not recognized. A constant that is too large
                 for the device has to be moved. Transfers by torch and libraries, and programs with torch.compile, are not recorded. Not
                 tried with a real device.
Fix              move it once, before the loop; compute on the device what is done to it on the CPU; DataLoader(..., pin_memory=True).
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from sonde.events import Finding, OptimizerCreated, Severity, StepProfile, TransfersMeasured
from sonde.formatting import number, size
from sonde.rules._shared.profiled_steps import evenly_spaced
from sonde.rules._shared.read_event_tables import amount, text
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

FEWEST = 2  # pairs of steps: what one of them does may be done rarely
LONG = 0.1  # of the step: less may not matter
LEAST_BYTES = 1 << 16  # CUDA copies so much into its own buffer at once: Python does not wait, wherever it lies

Row = Mapping[str, Any]


class RepeatedTransfer(NamedTuple):
    """A line that moved tensors in one recorded step."""

    step: int
    step_ms: float  # NaN if times were not recorded
    row: Row


class Defect(NamedTuple):
    """A reason why a transfer need not be made."""

    kind: str
    is_meant: Callable[[Row], bool]
    describe: Callable[[Row], str]
    fix: str
    at_most: Severity = Severity.WARNING


def check(view: RunView) -> Result:
    # Older runs do not count transfers.
    counts = [profile.num_transfers for profile in view.events(StepProfile) if profile.num_transfers is not None]
    if not any(counts):
        devices = {text(group, "device") for optimizer in view.events(OptimizerCreated) for group in optimizer.groups}
        return Clear() if counts or devices == {"cpu"} else NotEvaluated("no step was profiled")
    recorded = evenly_spaced(view.events_with_rows(TransfersMeasured))
    if len(recorded) < FEWEST:
        return NotEvaluated(f"the transfers of fewer than {FEWEST} pairs of steps were recorded")
    transfers = [
        RepeatedTransfer(view.step_number(at), _step_ms(view, at), transfer) for at, event in recorded for transfer in event.transfers
    ]
    findings = [_finding(defect, transfers, len(recorded)) for defect in DEFECTS]
    return [finding for finding in findings if finding] or Clear()


def _step_ms(view: RunView, row: int) -> float:
    return float(view.steps["step_ms"][row] - view.steps["sonde_ms"][row]) if row < view.num_steps else float("nan")


def _finding(defect: Defect, transfers: Sequence[RepeatedTransfer], num_recorded: int) -> Finding | None:
    """About the lines that do so in most of the recorded steps; the one that takes longest is named."""
    by_line: dict[str, list[RepeatedTransfer]] = {}
    for transfer in filter(lambda each: defect.is_meant(each.row), transfers):
        by_line.setdefault(text(transfer.row, "line"), []).append(transfer)
    usual = {line: of_line for line, of_line in by_line.items() if len(of_line) >= max(FEWEST, num_recorded / 2)}
    if not usual:
        return None
    ms = {line: median(amount(each.row, "ms") for each in of_line) for line, of_line in usual.items()}
    line = max(usual, key=lambda each: ms[each])
    total_ms, row = sum(ms.values()), usual[line][-1].row
    shares = [total_ms / each.step_ms for each in usual[line] if each.step_ms > 0]
    share = median(shares) if shares else 0.0
    num_others = len(usual) - 1
    return RULE.finding(
        defect.at_most if share >= LONG else Severity.INFO,
        usual[line][0].step,
        cause=f"{line} {defect.describe(row)}"
        + (f", and {num_others} other line{'s do' if num_others > 1 else ' does'} so too" if num_others else "")
        + (f"; that takes {number(total_ms)} ms, {100 * share:.2g} % of the step" if shares else ""),
        fix=defect.fix,
        evidence={
            "kind": defect.kind,
            "bytes_per_step": amount(row, "num_bytes"),
            "ms_per_step": ms[line],
            "share": share,
            "origin": text(row, "origin"),
            "target": text(row, "target"),
            "source": line,
            "source_text": text(row, "text"),
        },
    )


def _describe_same(row: Row) -> str:
    num = amount(row, "num_same")
    tensors, them = (f"tensor ({_tensor(row)})", "it") if num == 1 else (f"{number(num)} tensors (the largest {_tensor(row)})", "them")
    return f"moves the same {tensors} {_between(row)} in every step, and nothing in {them} has changed"


def _describe_again(row: Row) -> str:
    num = amount(row, "num_again")
    times = "once" if num == 1 else f"{number(num)} times"
    return f"moves a tensor ({_tensor(row)}) {_between(row)} that is there already, unchanged, {times} in every step"


def _describe_back(row: Row) -> str:
    left_at = text(row, "left_at") or "another line"
    return f"moves back to {text(row, 'target')}, in every step, what {left_at} moves from there to the CPU ({_tensor(row)})"


def _describe_pageable(row: Row) -> str:
    return (
        f"moves a tensor ({_tensor(row)}) {_between(row)} with non_blocking=True, but not out of pinned memory: Python waits for the copy "
        "all the same"
    )


def _between(row: Row) -> str:
    origin, target = ("the CPU" if text(row, name) == "cpu" else text(row, name) for name in ("origin", "target"))
    return f"from {origin} to {target}"


def _tensor(row: Row) -> str:
    return f"{text(row, 'what')}, {size(amount(row, 'what_bytes'))}"


DEFECTS = (
    Defect("same", lambda row: amount(row, "num_same") > 0, _describe_same, "move it once, before the loop, and use the copy"),
    Defect(
        "again",
        lambda row: amount(row, "num_again") > 0 and not amount(row, "num_same"),
        _describe_again,
        "move it once per step, and use the copy",
    ),
    Defect(
        "back",
        lambda row: amount(row, "num_back") > 0,
        _describe_back,
        "leave it on the device, and do there what is done to it on the CPU; to detach it from the graph, .detach() is enough",
    ),
    Defect(
        "pageable",
        lambda row: amount(row, "num_pageable") > 0 and amount(row, "what_bytes") > LEAST_BYTES,
        _describe_pageable,
        "make the batches in pinned memory: DataLoader(..., pin_memory=True)",
        at_most=Severity.INFO,
    ),
)

RULE = Rule("silent-transfer", check, page=__doc__)
