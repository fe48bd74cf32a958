"""The report of `profile_operations`: the time of torch operations, and the lines of the user's code that call them."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from sonde.formatting import DASH, milliseconds, si_number, strict, whole_percent
from sonde.render.summaries.tables import html_table, text_table

TOP = 15  # printed operations; the report contains all
_HEAD = ("operation", "self ms", "share", "calls", "memory", "FLOP", "where")


@dataclass(frozen=True, slots=True)
class OperationSite:
    """Where an operation is called. A backward operation belongs to the line whose forward operation created it."""

    line: str = ""  # `model.py:12`; "" if no code of the user is in the call stack
    text: str = ""  # the source of that line
    layer: str = ""  # path of the innermost layer that calls it
    phase: str = ""  # "data", "forward", "loss", "backward" or "optimizer"
    self_ms: float = 0.0  # per batch
    shapes: str = ""  # of the inputs of its longest call

    def __str__(self) -> str:
        where = self.line or (f"layer {self.layer}" if self.layer else f"({self.phase})")
        return f"{where} backward" if self.phase == "backward" and (self.line or self.layer) else where


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One torch operation, over all of its calls. Times, bytes and FLOPs are per batch."""

    name: str  # `aten::addmm`
    calls: float
    self_ms: float  # on the CPU, without the operations that it calls
    total_ms: float  # with them
    share: float  # of the time in all operations, by self time
    memory_bytes: int  # allocated by the operation itself
    flops: int  # by torch's formulas, which do not include attention
    places: tuple[OperationSite, ...]  # the most expensive first


@dataclass(frozen=True, slots=True)
class OperationsReport:
    """What torch.profiler recorded. The times include its own cost: compare operations with each other, not with a bare step."""

    title: str
    num_batches: int
    operations: tuple[OperationCost, ...]  # by self time
    step_ms: float  # median of the profiled batches
    bare_ms: float  # of a batch before the profiler started; NaN if there was none
    peak_bytes: int  # highest allocation since profiling started
    trace: Path | None = None  # file for Perfetto and TensorBoard
    notes: tuple[str, ...] = ()

    @property
    def operations_ms(self) -> float:
        """Time in operations, per batch. The rest of `step_ms` is Python."""
        return math.fsum(one.self_ms for one in self.operations)

    @property
    def flops(self) -> int:
        return sum(one.flops for one in self.operations)

    def top(self, num: int = TOP) -> tuple[OperationCost, ...]:
        return self.operations[:num]

    def lines(self) -> list[tuple[str, str, float]]:
        """Lines of the user's code by the time of their operations, including the backward: line, its source, milliseconds per batch."""
        sums: dict[tuple[str, str], float] = {}
        for place in (place for one in self.operations for place in one.places if place.line):
            sums[place.line, place.text] = sums.get((place.line, place.text), 0.0) + place.self_ms
        return sorted(((line, text, ms) for (line, text), ms in sums.items()), key=lambda row: -row[2])

    def to_dict(self) -> dict[str, object]:
        document: dict[str, object] = strict({**asdict(self), "flops": self.flops})
        return document

    def summary(self) -> str:
        parts = [self._headline(), "", text_table(_HEAD, self._rows())]
        lines = self.lines()[:TOP]
        if lines:
            rows = [(line, milliseconds(ms), whole_percent(ms / self.operations_ms), text) for line, text, ms in lines]
            parts += ["", text_table(("line", "ms", "share", ""), rows)]
        return "\n".join([*parts, "", *self._facts()])

    __str__ = summary

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows(), title=self._headline(), notes=self._facts())

    def _headline(self) -> str:
        bare = f" ({milliseconds(self.bare_ms)} ms without the profiler)" if math.isfinite(self.bare_ms) else ""
        inside = whole_percent(self.operations_ms / self.step_ms) if self.step_ms > 0 else DASH
        batches = f"{self.num_batches:,} batch{'' if self.num_batches == 1 else 'es'}"
        return f"operations of {self.title}: {batches}, {milliseconds(self.step_ms)} ms each{bare}, {inside} of it in operations"

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            (
                one.name, milliseconds(one.self_ms), whole_percent(one.share), f"{one.calls:,.4g}",
                si_number(one.memory_bytes, "B") if one.memory_bytes else DASH, si_number(one.flops) if one.flops else DASH,
                str(one.places[0]) if one.places else "",
            )
            for one in self.top()
        ]  # fmt: skip

    def _facts(self) -> list[str]:
        facts = [f"memory   {si_number(self.peak_bytes, 'B')} at most, in addition to what was allocated before"]
        if self.flops:
            facts.append(f"FLOPs    {si_number(self.flops, 'FLOP')} per batch, by torch's formulas")
        if self.trace is not None:
            facts.append(f"trace    {self.trace}  (https://ui.perfetto.dev, or tensorboard --logdir {self.trace.parent})")
        return [*facts, *(f"note     {note}" for note in self.notes)]
