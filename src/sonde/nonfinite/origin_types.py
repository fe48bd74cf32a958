"""`Origin`: the operation that created a NaN or an Inf, as plain data that a run log stores and any process can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sonde.formatting import listing, strict

MAX_LISTED = 8  # samples in a sentence; `samples` holds all of them


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """Shape, range and counts of a tensor. The range covers the finite elements; it is 0 to 0 if there are none."""

    name: str  # "input", "weight", "fc.weight" …: the name of the argument or the path in the model; "" if it has no name
    shape: tuple[int, ...]
    dtype: str  # "float32"
    num: int
    low: float
    high: float
    zeros: int
    nan: int
    inf: int

    def __str__(self) -> str:
        """`input float32 [32, 10], 0 to 0.73, 12 zeros`."""
        size = ", ".join(map(str, self.shape))
        zeros = "zero" if self.zeros == 1 else "zeros"
        counts = [f"{num:,} {what}" for num, what in ((self.zeros, zeros), (self.nan, "NaN"), (self.inf, "Inf")) if num]
        bounds = f"{self.low:.4g} to {self.high:.4g}" if self.num > self.nan + self.inf else "nothing finite" if self.num else "empty"
        return ", ".join([f"{self.name} {self.dtype} [{size}]".strip(), bounds, *counts])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorSummary:
        """Read what `Origin.to_dict` wrote; ignore fields of later versions."""
        known = {field.name: data[field.name] for field in fields(cls)}
        return cls(**known | {"shape": tuple(data["shape"]), "low": float(data["low"]), "high": float(data["high"])})


@dataclass(frozen=True, slots=True)
class Origin:
    """The operation that turned finite numbers into a NaN or an Inf, and the reason."""

    kind: str  # "nan" | "inf"
    phase: str  # "input" | "parameter" | "buffer" | "forward" | "backward"
    operation: str  # "log", "sqrt", "div", "softmax" …: the name that a user knows
    module: str  # dotted path of the running module, "" outside of any
    source: str  # "train.py:41", the line in the user's code; "" if no line of theirs was running
    text: str  # that line
    cause: str  # one sentence, with the user's numbers
    fix: str  # one sentence: what to change
    key: str  # the name of the defect: "log-of-zero", "sqrt-at-zero" …; docs/tools/find-origin.md lists them
    inputs: tuple[TensorSummary, ...] = ()
    output: TensorSummary | None = None
    parameters: tuple[str, ...] = ()  # paths of the parameters among the inputs
    samples: tuple[int, ...] | None = None  # indices in the batch that trigger it; (): only the whole batch does; None: not searched
    indices: tuple[int, ...] | None = None  # the same samples as indices in the dataset, if the sampler allows it
    how: str = "traced"  # "traced" | "replayed" | "graph"
    after: tuple[str, ...] = ()  # modules that produced the inputs of the operation, nearest first
    sizes: tuple[tuple[str, float], ...] = ()  # largest absolute output of these modules and of the running one in that step
    caveats: tuple[str, ...] = ()  # what could not be determined, one sentence each

    @property
    def place(self) -> str:
        """`log in encoder.head (train.py:41)`."""
        within = f" in {self.module}" if self.module else ""
        return f"{self.operation}{within}" + (f" ({self.source})" if self.source else "")

    def summary(self) -> str:
        """A few lines for a terminal."""
        made = "NaN" if self.kind == "nan" else "Inf"
        if self.phase in ("forward", "backward"):
            back = "the backward of " if self.phase == "backward" else ""
            lines = [f"{made} made by {back}{self.place}"]
        else:
            lines = [f"{made} already in {'an' if self.phase == 'input' else 'a'} {self.phase} of {self.place}"]
        lines += [f"    {self.text}"] if self.text else []
        lines += [f"  cause   {self.cause}", f"  fix     {self.fix}"]
        lines += [f"  {'inputs' if i == 0 else '':<7} {tensor}" for i, tensor in enumerate(self.inputs)]
        lines += [f"  output  {self.output}"] if self.output else []
        lines += [f"  weights {', '.join(self.parameters)}"] if self.parameters else []
        if self.samples is not None:
            lines.append(f"  samples {self._format_samples()}")
        return "\n".join([*lines, *(f"  note    {caveat}" for caveat in self.caveats)])

    __str__ = summary

    def _format_samples(self) -> str:
        if not self.samples:
            return "no single one: it takes the whole batch"
        named = [(self.samples, "batch"), (self.indices or (), "dataset")]
        return ", ".join(f"{listing([*map(str, numbers)], MAX_LISTED)} of the {what}" for numbers, what in named if numbers)

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON: lists, numbers and strings; non-finite numbers are "NaN", "Infinity" or "-Infinity"."""
        return {name: strict(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """Read what `to_dict` wrote; ignore fields of later versions."""
        values = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        for name in ("parameters", "samples", "indices", "after", "caveats"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        values["sizes"] = tuple((str(path), float(size)) for path, size in values.get("sizes", ()))
        values["inputs"] = tuple(TensorSummary.from_dict(tensor) for tensor in values.get("inputs", ()))
        values["output"] = TensorSummary.from_dict(values["output"]) if values.get("output") else None
        return cls(**values)
