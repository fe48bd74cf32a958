"""Where a bad number was made: the answer of a search, as plain data that a run can hold and any process can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

MAX_SHOWN = 8  # samples in a sentence; programs find all of them in `samples`

_SPELT = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as in every JSON that Sonde writes


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor as it was at that moment. The range is over its finite elements; where there are none, 0 to 0."""

    name: str  # "input", "weight", "fc.weight" …: what the operation or the model calls it; "" where it has no name
    shape: tuple[int, ...]
    dtype: str  # "float32"
    num: int
    low: float
    high: float
    zeros: int
    nan: int
    inf: int

    @property
    def is_finite(self) -> bool:
        return not (self.nan or self.inf)

    def __str__(self) -> str:
        """`input float32 [32, 10], 0 to 0.73, 12 zeros`."""
        size = ", ".join(map(str, self.shape))
        zeros = "zero" if self.zeros == 1 else "zeros"
        bad = [f"{num:,} {what}" for num, what in ((self.zeros, zeros), (self.nan, "NaN"), (self.inf, "Inf")) if num]
        told = f"{self.low:.4g} to {self.high:.4g}" if self.num > self.nan + self.inf else "nothing finite" if self.num else "empty"
        return ", ".join([f"{self.name} {self.dtype} [{size}]".strip(), told, *bad])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Seen:
        known = {field.name: data[field.name] for field in fields(cls)}
        return cls(**known | {"shape": tuple(data["shape"]), "low": float(data["low"]), "high": float(data["high"])})


@dataclass(frozen=True, slots=True)
class Origin:
    """The operation that turned finite numbers into a NaN or an Inf, and why it did."""

    kind: str  # "nan" | "inf"
    phase: str  # "input" | "parameter" | "buffer" | "forward" | "backward"
    operation: str  # "log", "sqrt", "div", "softmax" …: the name that a user knows
    module: str  # dotted path of the module under way, "" outside of any
    source: str  # "train.py:41", the user's own line; "" where no line of theirs was under way
    text: str  # that line
    cause: str  # one sentence, with the user's numbers
    fix: str  # one sentence: what to change
    key: str  # which defect: "log-of-zero", "sqrt-at-zero" …; sonde.nonfinite.explain_forward lists them
    inputs: tuple[Seen, ...] = ()
    output: Seen | None = None
    parameters: tuple[str, ...] = ()  # paths of the parameters among the inputs
    samples: tuple[int, ...] | None = None  # culprits in the batch; (): it takes the whole batch; None: not looked for
    indices: tuple[int, ...] | None = None  # the same in the dataset, where the sampler allows
    how: str = "traced"  # "traced" | "replayed" | "graph"
    after: tuple[str, ...] = ()  # modules that made what the operation was given, the nearest first
    sizes: tuple[tuple[str, float], ...] = ()  # the largest number that these modules, and the one under way, put out in that step
    caveats: tuple[str, ...] = ()  # what could not be known, one sentence each

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
        lines += [f"  {'inputs' if i == 0 else '':<7} {seen}" for i, seen in enumerate(self.inputs)]
        lines += [f"  output  {self.output}"] if self.output else []
        lines += [f"  weights {', '.join(self.parameters)}"] if self.parameters else []
        if self.samples is not None:
            lines.append(f"  samples {self._said_samples()}")
        return "\n".join([*lines, *(f"  note    {caveat}" for caveat in self.caveats)])

    def __str__(self) -> str:
        return self.summary()

    def _said_samples(self) -> str:
        if not self.samples:
            return "no single one: it takes the whole batch"
        said = f"{_some(self.samples)} of the batch"
        return f"{said}, {_some(self.indices)} of the dataset" if self.indices else said

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON: lists, numbers and strings; what is not finite is "NaN", "Infinity" or "-Infinity"."""
        return {name: _strict(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """What `to_dict` gave; fields of later versions are left out."""
        given = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        for name in ("parameters", "samples", "indices", "after", "caveats"):
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        given["sizes"] = tuple((str(path), float(size)) for path, size in given.get("sizes", ()))
        given["inputs"] = tuple(Seen.from_dict(seen) for seen in given.get("inputs", ()))
        given["output"] = Seen.from_dict(given["output"]) if given.get("output") else None
        return cls(**given)


def _some(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:MAX_SHOWN]))
    return f"{shown} and {len(numbers) - MAX_SHOWN} more" if len(numbers) > MAX_SHOWN else shown


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return _SPELT[str(value)]
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
