"""What flows: sites, frames and events out of a training, findings out of the rules.

A `Site` is a place where something is measured. A `Frame` is what was measured at one step: one kind of thing, some sites, some
fields. An `Event` is something that happened once. All three are facts. A `Finding` is the only opinion.
How they look as bytes is in `sonde.runlog.format`; nothing else in Sonde knows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.floating[Any]]
    Ids = npt.NDArray[np.uint32]

STATISTICS = ("num", "mean", "std", "min", "max", "l2", "zeros", "nan", "inf")
"""One row of these describes one tensor. `num` counts all elements (0: there is no tensor, for instance no gradient); `zeros`, `nan`
and `inf` are counts; the other statistics are over the finite elements alone, so that one NaN does not hide the rest."""

STEP_SCALARS = (
    # what the training said
    "loss",  # of the first line that called backward in this step, averaged over its calls, unscaled; NaN also where none did
    "grad_norm",  # L2 norm of all gradients that the optimizers were given, as they were given (after clipping)
    "lr",  # first parameter group of the first optimizer that stepped
    "loss_scale",  # GradScaler's scale; NaN without one
    # how often the loop called what, since the last step ended
    "forwards",  # of a root model with gradients on
    "eval_forwards",  # of a root model with gradients off
    "backwards",
    "zero_grads",
    "clips",
    "optimizer_steps",  # optimizer.step() calls that changed parameters or could have
    "skipped_steps",  # GradScaler held an optimizer back
    "manual_updates",  # parameters changed with no optimizer
    "scheduler_steps",
    # the state of the gradients when an optimizer used them
    "stale_updates",  # gradients were never cleared since this optimizer's previous step, and a backward added to them
    "empty_updates",  # every gradient was None or zero
    "cleared_updates",  # empty, although a backward had written gradients since the previous step
    # modes during forwards with gradients
    "root_in_eval",  # forwards whose root model had training=False
    "mode_modules",  # modules that behave differently in eval (dropout, batch norm) in the models that ran
    "mode_modules_in_eval",  # of these, how many had training=False
    # milliseconds, by a monotonic clock; every moment belongs to the innermost phase, so these and sonde_ms add up to step_ms
    "data_ms",  # waiting for a batch of a DataLoader, and for its workers to start
    "transfer_ms",  # bringing tensors from the CPU to a device; 0 where there is none
    "forward_ms",  # of root models with gradients on
    "backward_ms",
    "optimizer_ms",
    "validation_ms",  # from the first forward without gradients, before any with, to the next call that trains
    "checkpoint_ms",  # torch.save
    "other_ms",
    "step_ms",
    "sonde_ms",  # Sonde's own, included in step_ms
    "observed",  # 1 where the statistics of all sites were taken in this step
)
"""The sites of a `step` frame that every run has. Further losses (`loss:2`, one per further line of code that calls backward) and
further learning rates (`lr:1.2`: first optimizer, second parameter group) add to them; so do, where they were measured, `rss_mb`
(physical memory of the process, MiB), `cuda_mb` (allocated on the device), `parameters_mb`, `gradients_mb`, `optimizer_state_mb` and
`kept_graphs` (earlier observed steps whose autograd graph is still alive)."""


class Kind:
    """The kinds of frames. All but `STEP`, `LOG`, `BATCH` and the exponents carry `STATISTICS`."""

    STEP = "step"  # scalars, once per step, every step; field: value
    ACTIVATION = "activation"  # what each leaf module put out
    ACTIVATION_GRADIENT = "activation_gradient"  # gradient of the loss with respect to that output
    PARAMETER = "parameter"  # before the optimizer's step
    GRADIENT = "gradient"  # as the optimizer was given it
    UPDATE = "update"  # parameter after the optimizer's step minus before; where no optimizer holds it, since the last observed step
    BATCH = "batch"  # what went into the root model: STATISTICS, then size (first dimension) and hash
    LOG = "log"  # what the user gave to session.log; field: value; may come after its step's frame
    EXPONENTS = "_exponents"  # suffix of a statistics kind: rows of (site, exponent, count), power-of-two histogram


BATCH_FIELDS = (*STATISTICS, "size", "hash")
EXPONENT_FIELDS = ("exponent", "count")  # floor(log2 |x|) of the non-zero finite elements, and how many have it


@dataclass(frozen=True, slots=True)
class Site:
    """A place where something is measured. Model, path, kind and call are fields, never parts of one string."""

    id: int
    kind: str  # "output" | "parameter" | "input" | "scalar"
    path: str  # dotted path inside the model; for a scalar its name
    model: str = ""  # which model; "" for the first that a run watches
    type: str = ""  # class of the module that owns it, e.g. "ReLU"
    call: int = 0  # a shared module is called several times per forward: which call
    item: int = 0  # a module may put out several tensors: which one
    shape: tuple[int, ...] = ()  # as first seen
    dtype: str = ""
    trainable: bool = True

    @property
    def name(self) -> str:
        """How a person calls it: the path, after the model's name where there are several models."""
        return f"{self.model}.{self.path}" if self.model else self.path

    @property
    def module(self) -> str:
        """The dotted path of the module: a parameter's owner, an output's producer."""
        return self.path.rpartition(".")[0] if self.kind == "parameter" else self.path


@dataclass(frozen=True, slots=True)
class Frame:
    """What was measured at one step. `values` has one row per field and one column per site."""

    kind: str
    step: int
    sites: Ids
    fields: tuple[str, ...]
    values: Floats

    def __getitem__(self, field_name: str) -> Floats:
        """One field for all sites, in the order of `sites`."""
        column: Floats = self.values[self.fields.index(field_name)]
        return column


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once. The kinds and what they carry are listed in docs/run-format.md."""

    kind: str
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that is known about one step of one process: what a rule sees."""

    number: int
    rank: int
    scalars: Mapping[str, float]
    frames: Mapping[str, Frame]
    events: tuple[Event, ...]
    sites: Mapping[int, Site]

    def scalar(self, name: str, default: float = float("nan")) -> float:
        return self.scalars.get(name, default)

    def table(self, kind: str) -> list[tuple[Site, dict[str, float]]]:
        """The rows of a frame with their sites, for rules that walk them; empty where the kind was not measured."""
        frame = self.frames.get(kind)
        if frame is None:
            return []
        rows = frame.values.T.tolist()
        return [(self.sites[i], dict(zip(frame.fields, row))) for i, row in zip(frame.sites.tolist(), rows) if i in self.sites]


class Severity(StrEnum):
    INFO = "info"  # worth knowing; never makes a verdict
    WARNING = "warning"  # probably a mistake
    ERROR = "error"  # results are wrong or much worse
    CRITICAL = "critical"  # nothing useful is learnt

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """A conclusion, with what supports it."""

    rule: str  # names the defect; reads well after "found a …"
    severity: Severity
    where: str  # dotted module or parameter path, "" for the whole run
    step: int  # first step at which the evidence holds
    cause: str  # one sentence, with the user's own numbers
    fix: str  # one sentence: what to change
    evidence: Mapping[str, float | str] = field(default_factory=dict)
