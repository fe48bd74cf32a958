"""The data that passes between the training process, the run log and the rules.

A `Site` names a measured tensor or scalar. A `Frame` holds the measurements of one step. An `Event` records something that happens once;
each kind of event has a dataclass in `EVENT_TYPES`. These three hold facts. A `Finding` is the conclusion of a rule.
`sonde.runlog.record_format` alone knows their representation in bytes.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, Union, dataclass_transform, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.floating[Any]]
    Ids = npt.NDArray[np.uint32]

STATISTICS = ("num", "mean", "std", "min", "max", "l2", "zeros", "nan", "inf")
"""One row of these describes one tensor. `num` counts all elements (0: there is no tensor, for instance no gradient); `zeros`, `nan`
and `inf` are counts; the other statistics cover the finite elements only, so that one NaN does not hide the rest."""

STEP_SCALARS = (
    # values of the training
    "loss",  # mean over the backward calls of the first line that calls backward, unscaled; NaN in a step without backward
    "grad_norm",  # L2 norm of all gradients that the optimizers receive (after clipping)
    "lr",  # first parameter group of the first optimizer that steps
    "loss_scale",  # scale of the GradScaler; NaN without one
    # calls since the previous step ended
    "forwards",  # of a root model, with gradients enabled
    "eval_forwards",  # of a root model, with gradients disabled
    "backwards",
    "zero_grads",
    "clips",
    "optimizer_steps",  # optimizer.step() calls that are not skipped by a GradScaler
    "skipped_steps",  # optimizer.step() calls that a GradScaler skips
    "manual_updates",  # parameter changes without an optimizer
    "scheduler_steps",
    # state of the gradients when an optimizer uses them
    "stale_updates",  # the gradients are not cleared since the previous step of this optimizer, and a backward adds to them
    "empty_updates",  # every gradient is None or zero
    "cleared_updates",  # empty, although a backward wrote gradients since the previous step
    # modes during forwards with gradients enabled
    "root_in_eval",  # forwards of a root model with training=False
    "mode_modules",  # modules that depend on the mode (dropout, batch norm) in the models that run
    "mode_modules_in_eval",  # those of them with training=False
    # milliseconds of a monotonic clock; time counts for the innermost phase, so the phases and sonde_ms add up to step_ms
    "data_ms",  # wait for a batch of a DataLoader, and for its workers to start
    "transfer_ms",  # transfer of tensors from the CPU to a device; 0 without a device
    "forward_ms",  # root models, with gradients enabled
    "backward_ms",
    "optimizer_ms",
    "validation_ms",  # from the first forward without gradients to the next call that trains
    "checkpoint_ms",  # torch.save
    "other_ms",
    "step_ms",
    "sonde_ms",  # time of Sonde itself, included in step_ms
    "observed",  # 1 in steps that measure the statistics of all sites
)
"""The sites of a `step` frame that every run has. A run adds further losses (`loss:2`: one for each further line that calls backward),
learning rates (`lr:1.2`: first optimizer, second parameter group), and the `OPTIONAL_SCALARS` that are measured."""

OPTIONAL_SCALARS = (
    "rss_mb",  # physical memory of the process, MiB
    "cuda_mb",  # allocated on the device
    "parameters_mb",
    "gradients_mb",
    "optimizer_state_mb",
    "kept_graphs",  # earlier observed steps with an autograd graph that is still alive
)


class Kind:
    """The kinds of frames. All except `STEP`, `LOG`, `BATCH` and the exponents hold `STATISTICS`."""

    STEP = "step"  # scalars of every step; field: value
    ACTIVATION = "activation"  # outputs of each leaf module
    ACTIVATION_GRADIENT = "activation_gradient"  # gradient of the loss with respect to these outputs
    PARAMETER = "parameter"  # before the optimizer step
    GRADIENT = "gradient"  # as the optimizer receives it
    UPDATE = "update"  # parameter after the optimizer step minus before; without an optimizer, the change since the last observed step
    BATCH = "batch"  # inputs of the root model: STATISTICS, then size (first dimension) and hash
    LOG = "log"  # numbers passed to session.log; field: value; may follow the step frame of its step
    EXPONENTS = "_exponents"  # suffix of a kind with STATISTICS: rows of (site, exponent, count), a power-of-two histogram


SITE_KINDS = {  # the kind of the sites that a frame measures
    Kind.STEP: "scalar", Kind.LOG: "scalar", Kind.ACTIVATION: "output", Kind.ACTIVATION_GRADIENT: "output", Kind.BATCH: "input",
    Kind.PARAMETER: "parameter", Kind.GRADIENT: "parameter", Kind.UPDATE: "parameter",
}  # fmt: skip


BATCH_FIELDS = (*STATISTICS, "size", "hash")
EXPONENT_FIELDS = ("exponent", "count")  # floor(log2 |x|) of the non-zero finite elements, and the number of elements with it


# Of the data types that do not have four.
_ITEM_BYTES = {"float64": 8, "complex64": 8, "complex128": 16, "float16": 2, "bfloat16": 2, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class Site:
    """A measured tensor or scalar. Model, path, kind and call are separate fields, never parts of one string."""

    id: int
    kind: str  # "output" | "parameter" | "input" | "scalar"
    path: str  # dotted path inside the model; the name of a scalar
    model: str = ""  # name of the model; "" for the first model of a run
    type: str = ""  # class of the module that owns it, e.g. "ReLU"
    call: int = 0  # index of the call, for a shared module that runs several times per forward
    item: int = 0  # index of the tensor, for a module with several output tensors
    shape: tuple[int, ...] = ()  # at the first measurement
    dtype: str = ""
    trainable: bool = True

    @property
    def name(self) -> str:
        """The path, with the name of the model in front when a run has several models."""
        return f"{self.model}.{self.path}" if self.model else self.path

    @property
    def num_bytes(self) -> int:
        """The size of its elements at the first measurement."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype.removeprefix("torch."), 4)

    @property
    def module(self) -> str:
        """The dotted path of the module that owns the parameter or produces the output."""
        return self.path.rpartition(".")[0] if self.kind == "parameter" else self.path


@dataclass(frozen=True, slots=True)
class Frame:
    """The measurements of one kind at one step. `values` has one row per field and one column per site."""

    kind: str
    step: int
    sites: Ids
    fields: tuple[str, ...]
    values: Floats

    def __getitem__(self, field_name: str) -> Floats:
        """One field for all sites, in the order of `sites`."""
        column: Floats = self.values[self.fields.index(field_name)]
        return column


# ---- typed events

class Key(str):
    """Metadata of an event field: its key in the log, when that differs from its Python name."""

    __slots__ = ()


class _OmitNone:
    """Metadata of an event field that is left out of the log when it is None."""


OMIT_NONE = _OmitNone()

Row = Mapping[str, Any]
"""One entry of a table inside an event. The description of the field lists its keys."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class _EventDataclass:
    """Makes its subclasses frozen dataclasses with keyword arguments only, which inherit their methods from `TypedEvent`.
    `@dataclass(frozen=True, slots=True)` compiles six methods for each of the 37 classes, which takes half as long as to import numpy."""

    KIND: ClassVar[str]  # the kind in the log

    def __init_subclass__(cls, *, kind: str = "") -> None:
        cls.KIND = kind
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)


class TypedEvent(_EventDataclass):
    """Base of the event types. Each field is `Annotated[type, description]`. A field without a default is always written. When a log lacks
    a field, the decoder uses its default, or the empty value of its type."""

    step: int = -1  # set by the decoder; a writer passes the step beside the event
    extra: Mapping[str, Any] = field(default_factory=dict)  # keys of the log that this version does not know

    def __init__(self, **values: Any) -> None:
        own_type: Any = type(self)
        required, defaults = _arguments_of(own_type)
        state = {**defaults, "extra": {}, **values}
        if len(state) != len(required) + len(defaults) + 1 or not required <= values.keys():
            wrong = sorted(required - values.keys()) or sorted(values.keys() - required - defaults.keys() - {"extra"})
            raise TypeError(f"{type(self).__name__}: missing or unknown arguments {wrong}")
        self.__dict__.update(state)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), self.step))  # fields hold lists and mappings

    def __repr__(self) -> str:
        values = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"{type(self).__name__}({values})"


class UnknownEvent(TypedEvent):
    """An event of a kind that this version does not know; `extra` holds its data."""

    kind: str


@dataclass(frozen=True, slots=True)
class UnreadableEvent:
    """An event with a value of the wrong type."""

    kind: str
    step: int
    reason: str
    data: Any


class Started(TypedEvent, kind="start"):
    """First event of a run."""

    name: Annotated[str, "name of the run"]
    argv: Annotated[Sequence[str], "command line"]
    sonde: Annotated[str, "version of Sonde"]
    python: Annotated[str, "version of Python"]
    torch: Annotated[str, "version of PyTorch"]
    every: Annotated[int | None, "observed steps are this many steps apart; null: as often as the overhead budget allows"]
    mode: Annotated[str, "debug mode"]
    level: Annotated[str, "debug level"]
    overhead_budget: Annotated[float, "share of the training time that Sonde may use"]
    sampling_rate: Annotated[float | None, "share of the steps that should be observed, if the budget allows it", OMIT_NONE] = None
    layers: Annotated[Sequence[str] | None, "patterns of the layers that are measured; absent: all", OMIT_NONE] = None
    memory_threshold_mb: Annotated[float | None, "memory of the process above which the user wants a finding", OMIT_NONE] = None
    memory_threshold_share: Annotated[float | None, "the same, as a share of the memory limit", OMIT_NONE] = None
    has_native_kernel: Annotated[bool, "the compiled extension is in use", Key("native_kernel")]
    threads: Annotated[int, "`torch.get_num_threads()`"]
    script: Annotated[str | None, "script that `sonde run` executes", OMIT_NONE] = None
    framework: Annotated[str | None, "`lightning`, `transformers` or `accelerate`, in their integrations", OMIT_NONE] = None
    package: Annotated[str | None, "Python package of the framework", OMIT_NONE] = None
    package_version: Annotated[str | None, "its version", OMIT_NONE] = None


class ModelWatched(TypedEvent, kind="model"):
    """A model is watched from here on."""

    model: Annotated[str, "name of the model"]
    class_name: Annotated[str, "class of the model", Key("class")]
    num_parameters: Annotated[int, "parameter elements"]
    num_trainable: Annotated[int, "those that require gradients"]
    num_modules: Annotated[int, "modules"]
    num_leaves: Annotated[int, "modules with measured outputs"]
    num_mode_modules: Annotated[int, "modules that depend on the mode (dropout, batch norm)"]
    is_compiled: Annotated[bool, "`torch.compile` was applied", Key("compiled")]
    source: Annotated[str, "line of user code that passes it to Sonde or runs it first"]


class OptimizerCreated(TypedEvent, kind="optimizer"):
    """An optimizer is created, or first used when it was created before the run."""

    class_name: Annotated[str, "class of the optimizer", Key("class")]
    optimizer: Annotated[int, "index of the optimizer"]
    groups: Annotated[
        Sequence[Row], "parameter groups: lr, num_parameters, fused, foreach, momentum, device, initial_lr (with a scheduler)"
    ]
    source: Annotated[str, "line of user code that creates it"]
    text: Annotated[str, "source text of that line"]


class OwnershipChanged(TypedEvent, kind="membership"):
    """The assignment of parameters to optimizers changes."""

    num_unowned: Annotated[int, "trainable parameters of the watched models that no optimizer holds"]
    unowned: Annotated[Sequence[str], "their names, at most 200"]
    optimizers: Annotated[
        Sequence[Row],
        "optimizer, class, num_owned, num_foreign (parameters of no watched model), num_foreign_with_grad, foreign (shapes, at most 20)",
    ]
    left_behind: Annotated[
        Sequence[Row] | None, "tensors on the CPU of a model on a device: kind, path, num_elements, device, model_on", OMIT_NONE
    ] = None


class CallSiteFound(TypedEvent, kind="source"):
    """First call of one kind from one line of user code."""

    call: Annotated[
        str,
        "`backward`, `optimizer_step`, `zero_grad`, `forward`, `eval_forward`, `scheduler_step`, `clip`, `checkpoint`, `transfer`, "
        "`loader`",
    ]
    line: Annotated[str, "`train.py:41`"]
    text: Annotated[str, "source text of that line"]
    series: Annotated[str | None, "backward: name of its loss scalar", OMIT_NONE] = None
    optimizer: Annotated[int | None, "optimizer_step: index of the optimizer", OMIT_NONE] = None
    num_workers: Annotated[int | None, "loader: worker processes", OMIT_NONE] = None
    batch_size: Annotated[int | None, "loader: samples per batch; 0 when the loader does not batch", OMIT_NONE] = None
    pin_memory: Annotated[bool | None, "loader: as passed to DataLoader", OMIT_NONE] = None
    persistent_workers: Annotated[bool | None, "loader: as passed to DataLoader", OMIT_NONE] = None
    dataset: Annotated[str | None, "loader: class of the dataset", OMIT_NONE] = None
    order: Annotated[str | None, "loader: `random`, `sequential`, `stream` or `other`", OMIT_NONE] = None
    num_batches: Annotated[int | None, "loader: its length", OMIT_NONE] = None
    copied_generators: Annotated[
        Sequence[str] | None, "loader: random generators in the dataset that every worker copies, with two or more workers", OMIT_NONE
    ] = None
    copied_globals: Annotated[Sequence[str] | None, "loader: the same for generators of a module", OMIT_NONE] = None
    seeded_alike: Annotated[Sequence[str] | None, "loader: global generators that `worker_init_fn` seeds alike", OMIT_NONE] = None
    is_worker_aware: Annotated[bool | None, "loader: the dataset reads its worker id", Key("knows_worker"), OMIT_NONE] = None


class BatchInspected(TypedEvent, kind="data"):
    """The samples and labels of a batch are compared with each other."""

    num_fetched: Annotated[int, "batches that DataLoaders return in this step before the model runs"]
    num_inputs: Annotated[int, "input tensors that can distinguish samples, without labels"]
    num_alike: Annotated[int, "those of them in which all samples are equal"]
    size: Annotated[int, "samples in the batch"]
    sample: Annotated[float | None, "hash of one of the equal samples"]
    labels: Annotated[
        Row | None,
        "num, num_classes, num_distinct, is_learnt (the scores are a product with trainable weights), "
        "counts ([label, count], the 64 most frequent), in_order; null when the labels are unknown",
    ]


class EvaluatedInTrainMode(TypedEvent, kind="evaluated_in_training"):
    """A trained model runs without gradients in training mode. Written at its next evaluation or at the end of the run: for the first 16
    evaluations of each model, then the 32nd, 64th …"""

    model: Annotated[str, "name of the model"]
    at_step: Annotated[int, "step of the evaluation", Key("at")]
    num_pauses: Annotated[int, "evaluations of this model so far"]
    num_forwards: Annotated[int, "forwards of this evaluation"]
    num_inputs: Annotated[int, "distinct inputs among the first four"]
    input: Annotated[float, "hash of the first input"]
    num_dropout: Annotated[int, "dropout modules in training mode"]
    num_batch_norm: Annotated[int, "batch norm modules in training mode"]
    is_cumulative: Annotated[bool, "a batch norm has no momentum and averages over all batches", Key("cumulative")]
    num_models: Annotated[int, "models in training"]
    line: Annotated[str, "line of user code that runs it"]
    text: Annotated[str, "source text of that line"]


class StepProfile(TypedEvent, kind="xray"):
    """The step profiler measures one step in detail."""

    reason: Annotated[str, "`slow` (slow steps come at equal distances), `asked` (`performance_profiling_frequency`) or empty", Key("why")]
    lines: Annotated[Sequence[Row], "lines of user code with everything they call, the longest first: line, text, function, num, ms"]
    waits: Annotated[Sequence[Row], "lines that read numbers out of tensors: line, text, call, num, ms"]
    layers: Annotated[Sequence[Row], "path, type, dtype, num, forward_ms, backward_ms, multiplications, elements"]
    num_transfers: Annotated[int | None, "calls that move a tensor to another device", OMIT_NONE] = None
    machine: Annotated[Row, "threads, cores, load, cpu_share, pushed_off_per_s (involuntary context switches)"]
    fetch_ms: Annotated[float, "time to fetch the batch"]
    fetch_cpu_ms: Annotated[float, "CPU time of this thread during the fetch"]


class TransfersMeasured(TypedEvent, kind="transfers"):
    """The step after a step profile with transfers between devices ends."""

    transfers: Annotated[
        Sequence[Row],
        "line, text, call, origin, target (devices), num, num_bytes, ms, what and what_bytes (largest tensor), num_same (tensors that the "
        "previous step moved with the same contents), num_again (repeated transfers within this step), num_back (transfers of tensors that "
        "came from the target in this step), num_pageable (non-blocking copies out of memory that is not pinned), left_at (line that moved "
        "the returning tensors away), held_as (places in models that hold them; not counted in num_same and num_again)",
    ]


class SchedulerCreated(TypedEvent, kind="scheduler"):
    """A learning rate scheduler is created, or first stepped when it was created before the run; at most 200."""

    class_name: Annotated[str, "class of the scheduler", Key("class")]
    scheduler: Annotated[int, "index of the scheduler"]
    optimizer: Annotated[int, "index of its optimizer"]
    rates: Annotated[Sequence[float], "current learning rates of the parameter groups"]
    initial: Annotated[Sequence[float], "initial learning rates, to which the factors apply"]
    plan: Annotated[Row, "its arguments: total_steps, T_max, milestones, gamma …"]
    parts: Annotated[Sequence[int], "indices of the schedulers that it combines"]
    is_step_counted: Annotated[bool, "its `step` calls the one of PyTorch, so that Sonde counts the calls", Key("heard")]
    last_epoch: Annotated[float | Sequence[float] | None, "its `last_epoch`"]
    source: Annotated[str, "line of user code that creates it"]
    text: Annotated[str, "source text of that line"]


class SchedulerStarted(TypedEvent, kind="scheduler_begins"):
    """The program steps a scheduler for the first time."""

    scheduler: Annotated[int, "index of the scheduler"]
    has_argument: Annotated[bool, "`step` receives an argument", Key("given")]
    is_before_optimizer: Annotated[bool, "no optimizer has stepped or been skipped by a GradScaler", Key("before_optimizer")]
    last_epoch: Annotated[float | Sequence[float] | None, "`last_epoch` after this step"]
    source: Annotated[str, "line of user code that steps it"]
    text: Annotated[str, "source text of that line"]


class DataPass(TypedEvent, kind="pass"):
    """The program starts to iterate over a DataLoader; at most 2000, and 16 for a loader that is restarted at every step."""

    loader: Annotated[int, "index of the loader"]
    pass_number: Annotated[int, "number of this pass over the loader, from 1", Key("num")]
    num_batches: Annotated[int | None, "length of the loader; null when unknown"]
    is_last_recorded: Annotated[bool | None, "later passes are not recorded", Key("last_told"), OMIT_NONE] = None
    num_rounds: Annotated[int | None, "rounds of the enclosing `for … in range(…)` in user code", Key("planned"), OMIT_NONE] = None
    round_index: Annotated[int | None, "current round, from 0", Key("at"), OMIT_NONE] = None
    loop_line: Annotated[str | None, "line of that loop", Key("loop"), OMIT_NONE] = None
    break_lines: Annotated[Sequence[str] | None, "lines of its `break` statements, at most 4", Key("breaks"), OMIT_NONE] = None


class EarlyStoppingUpdated(TypedEvent, kind="early_stopping"):
    """`session.early_stopping` is created, receives a value (the first 1000) or stops the training."""

    monitor: Annotated[str, "name of the monitored value"]
    patience: Annotated[float, "evaluations without improvement before it stops"]
    min_delta: Annotated[float, "smallest change that counts as an improvement"]
    mode: Annotated[str, "`min` or `max`"]
    num_evaluations: Annotated[int, "values so far"]
    num_without_improvement: Annotated[int, "values since the best one", Key("num_without")]
    num_nan: Annotated[int, "values that are NaN"]
    best: Annotated[float | None, "best value"]
    best_step: Annotated[int | None, "its step"]
    is_stopped: Annotated[bool, "the training should stop", Key("stopped")]
    reason: Annotated[str, "the decision as a sentence", Key("why")]
    value: Annotated[float | None, "this value", OMIT_NONE] = None
    is_better: Annotated[bool | None, "it is the best so far", Key("better"), OMIT_NONE] = None


class NonFinite(TypedEvent, kind="nonfinite"):
    """A tensor holds NaN or Inf; at most once per step and `what`."""

    what: Annotated[str, "`loss`, `gradient`, `input` or `evaluation` (output of a model without gradients)"]
    where: Annotated[str, "name of the loss scalar, parameter or input; the model for an evaluation"]
    num_elements: Annotated[float | None, "elements of the tensor", OMIT_NONE] = None
    num_nan: Annotated[float | None, "elements that are NaN", OMIT_NONE] = None
    num_inf: Annotated[float | None, "elements that are Inf", OMIT_NONE] = None


class OriginFound(TypedEvent, kind="origin"):
    """The operation that produces the first NaN or Inf of a step is found. Holds the fields of `sonde.Origin`."""

    value_kind: Annotated[str, "`nan` or `inf`", Key("kind")]
    phase: Annotated[str, "`input`, `parameter`, `buffer`, `forward` or `backward`"]
    operation: Annotated[str, "`log`, `sqrt`, `div`, `softmax` …"]
    module: Annotated[str, "dotted path of the module that runs it"]
    source: Annotated[str, "line of user code"]
    text: Annotated[str, "source text of that line"]
    cause: Annotated[str, "cause, one sentence"]
    fix: Annotated[str, "fix, one sentence"]
    key: Annotated[str, "name of the defect, e.g. `log-of-zero`"]
    inputs: Annotated[Sequence[Row], "input tensors: name, shape, dtype, num, low, high, zeros, nan, inf"]
    output: Annotated[Row | None, "output tensor, with the same keys"]
    parameters: Annotated[Sequence[str], "parameters among the inputs"]
    samples: Annotated[Sequence[int] | None, "responsible samples of the batch; empty: the whole batch; null: unknown"]
    indices: Annotated[Sequence[int] | None, "their indices in the dataset"]
    how: Annotated[str, "`traced`, `replayed` or `graph`"]
    after: Annotated[Sequence[str], "modules that produce the inputs, the nearest first"]
    sizes: Annotated[Sequence[Sequence[str | float]], "[module, largest output in this step]"]
    caveats: Annotated[Sequence[str], "limits of the search, one sentence each"]
    what: Annotated[str, "`loss`, `gradient` or `evaluation`"]
    where: Annotated[str, "name of the loss scalar, parameter or model that is not finite", Key("bad")]
    search_ms: Annotated[float, "duration of the search", Key("look_back_ms")]
    capsule: Annotated[str | None, "path of the saved step, or the reason that it is not saved", OMIT_NONE] = None


class OriginUnknown(TypedEvent, kind="origin_unknown"):
    """The search for the first NaN or Inf of a step fails."""

    reason: Annotated[str, "reason of the failure"]
    what: Annotated[str, "`loss`, `gradient` or `evaluation`"]
    where: Annotated[str, "name of the loss scalar, parameter or model that is not finite", Key("bad")]
    search_ms: Annotated[float, "duration of the search", Key("look_back_ms")]


class SpikeDetected(TypedEvent, kind="spike"):
    """A loss or gradient norm leaves its usual range, and the step is analyzed; at most three per run."""

    what: Annotated[str, "`loss` or `gradient`"]
    where: Annotated[str, "name of the loss scalar, or `grad_norm`"]
    value: Annotated[float, "value of the spike"]
    median: Annotated[float, "median of the recent values", Key("usual")]
    low: Annotated[float, "lower end of the usual range"]
    high: Annotated[float, "upper end of the usual range"]
    bound: Annotated[float, "a value above it is a spike"]
    samples: Annotated[
        Sequence[int] | None, "responsible samples of the batch, the largest share first; empty: spread over the batch; null: unknown"
    ] = None
    shares: Annotated[Sequence[float], "their shares of the excess"] = ()
    indices: Annotated[Sequence[int] | None, "their indices in the dataset"] = None
    batch_size: Annotated[int, "samples in the batch"] = 0
    value_without_samples: Annotated[float | None, "the value without these samples", Key("without")] = None
    blame: Annotated[str, "`input`, `target`, `layer`, `slope`, `batch`, `update` (the batch is that of the step before) or empty"] = ""
    layer: Annotated[str, "dotted path of the responsible layer"] = ""
    deviation: Annotated[Row | None, "where the samples differ most from the others: name, size, others", Key("odd")] = None
    gradients: Annotated[Sequence[Sequence[str | float]], "[parameter, norm], the largest first"] = ()
    inputs: Annotated[Sequence[Row], "inputs of the model: name, shape, dtype, num, low, high, zeros, nan, inf"] = ()
    source: Annotated[str, "line of user code that computes the loss"] = ""
    text: Annotated[str, "source text of that line"] = ""
    how: Annotated[str, "`replayed`, `model`, `gradients` or empty: source of the result"] = ""
    caveats: Annotated[Sequence[str], "limits of the analysis, one sentence each"] = ()
    search_ms: Annotated[float, "duration of the analysis", Key("look_back_ms")]


class UpdateSkipped(TypedEvent, kind="overflow"):
    """A GradScaler skips an optimizer step: the first 16 times, and when the scale is low."""

    where: Annotated[str, "parameter nearest to the loss with a gradient that is not finite"]
    num_bad: Annotated[int, "parameters with such a gradient"]
    num_parameters: Annotated[int, "parameters of the optimizer"]
    num_nan: Annotated[int, "gradient elements that are NaN"]
    scale: Annotated[float, "loss scale"]
    scale_after: Annotated[float, "loss scale after `update()`"]
    by: Annotated[
        str | None, "after an analysis: `scale` (finite without the scale), `number` (not finite without it) or empty", OMIT_NONE
    ] = None
    origin: Annotated[Row | None, "fields of `sonde.Origin`", OMIT_NONE] = None
    reason: Annotated[str | None, "reason that the analysis fails", OMIT_NONE] = None
    search_ms: Annotated[float | None, "duration of the analysis", Key("look_back_ms"), OMIT_NONE] = None


ANSWER_KINDS = frozenset({OriginFound.KIND, OriginUnknown.KIND, SpikeDetected.KIND, UpdateSkipped.KIND})
"""Events with what a search has found. They may be written some steps after the step that was searched, which is their step."""


class StaleGradientsUsed(TypedEvent, kind="stale_update"):
    """An optimizer uses gradients that were not cleared since its previous step; once per optimizer."""

    optimizer: Annotated[int, "index of the optimizer"]


class MemoryLimitFound(TypedEvent, kind="memory_limit"):
    """The memory limit of the process is read; once per run."""

    num_bytes: Annotated[int, "bytes that the process may use"]
    by: Annotated[str, "`this machine`, `the container` or `ulimit -v`"]


class LeaksInvestigated(TypedEvent, kind="leaks"):
    """Memory or the number of live autograd graphs grows, and the tensors that stay alive are counted for some steps."""

    leaks: Annotated[Sequence[Row], "holder, cause, fix, num_bytes, num_tensors, num_nodes, per_step_bytes; at most 3"]
    num_steps: Annotated[int, "steps of the investigation"]
    search_ms: Annotated[float, "its duration", Key("look_ms")]


class MemoryExhausted(TypedEvent, kind="out_of_memory"):
    """The training ends because an allocation fails."""

    requested: Annotated[int | None, "bytes requested"]
    shape: Annotated[str, "shape and dtype requested"]
    message: Annotated[str, "error message"]
    phase: Annotated[str, "`forward`, `backward`, `optimizer`, `data` or empty"]
    module: Annotated[str, "dotted path of the module that runs"]
    module_type: Annotated[str, "its class"]
    source: Annotated[str, "line of user code"]
    text: Annotated[str, "source text of that line"]
    operands: Annotated[Sequence[str], "tensors on that line"]
    parameters: Annotated[int, "bytes of the parameters"]
    gradients: Annotated[int, "bytes of the gradients"]
    optimizer_state: Annotated[int, "bytes of the optimizer state"]
    rest: Annotated[int, "bytes in use by everything else"]
    in_use: Annotated[int, "bytes in use"]
    limit: Annotated[int | None, "bytes that the process may use"]
    limit_by: Annotated[str, "source of the limit"]
    batch_size: Annotated[int, "samples in the batch; 0 when unknown"]
    batch_fits: Annotated[int | None, "estimated batch size that fits", OMIT_NONE] = None


class FatalSignalReceived(TypedEvent, kind="fatal_signal"):
    """A signal kills the process. The reader makes this event from the file that faulthandler writes; no log contains it."""

    signal: Annotated[str, "`SIGILL`, `SIGSEGV`, `SIGBUS`, `SIGFPE` or `SIGABRT`"]
    meaning: Annotated[str, "the signal in words"]
    source: Annotated[str, "line of user code; empty when unknown"]
    function: Annotated[str, "function of that line"]
    inside: Annotated[str, "file of the library that the line calls; empty when the line itself is the last Python frame"]
    inside_line: Annotated[int, "its line; 0 when unknown"]
    inside_function: Annotated[str, "its function"]


class FrameworkTrainingStarted(TypedEvent, kind="integration"):
    """A framework starts to train."""

    framework: Annotated[str, "`lightning`, `transformers` or `accelerate`"]
    gradients: Annotated[str, "moment at which gradients are measured"]
    clipping: Annotated[str, "`clipped`, `unclipped` or who decides it"]
    clips_at: Annotated[float, "clipping threshold; 0 without clipping"]
    clips_by: Annotated[str, "`norm`, `value` or empty"]
    num_accumulated: Annotated[int, "batches per update", Key("accumulates")]
    precision: Annotated[str, "precision setting of the framework"]
    strategy: Annotated[str | None, "distribution strategy", OMIT_NONE] = None
    is_automatic: Annotated[bool | None, "Lightning: automatic optimization", Key("automatic"), OMIT_NONE] = None
    max_steps: Annotated[int | None, "planned steps", OMIT_NONE] = None
    max_epochs: Annotated[float | None, "planned epochs", OMIT_NONE] = None
    resumed_at: Annotated[int, "first step of the framework"]
    epoch: Annotated[float, "first epoch"]
    rank: Annotated[int, "rank of the process"]
    world_size: Annotated[int, "number of processes"]


class FrameworkEpochStarted(TypedEvent, kind="epoch"):
    """A framework starts an epoch."""

    epoch: Annotated[float, "index of the epoch"]
    framework_step: Annotated[int, "step of the framework"]


class FrameworkTrainingEnded(TypedEvent, kind="training_end"):
    """A framework completes its training."""

    framework_step: Annotated[int, "step of the framework"]
    epoch: Annotated[float, "epoch of the framework"]
    has_stopped_early: Annotated[bool, "the training ends before its planned length", Key("stopped_early")]


class TrackerConfigured(TypedEvent, kind="configuration"):
    """`accelerator.init_trackers` receives a configuration."""

    values: Annotated[Row, "its numbers, texts and booleans"]


class StepFailed(TypedEvent, kind="step_failed"):
    """A function under `@sonde.step` or a `session.training_step` raises an exception."""

    error: Annotated[str, "class and message of the exception"]


class ModelOutputShape(TypedEvent, kind="output"):
    """A root model returns its first output."""

    model: Annotated[str, "name of the model"]
    shape: Annotated[Sequence[int], "shape of the first output tensor"]
    dtype: Annotated[str, "its dtype"]


class NotMeasured(TypedEvent, kind="unobserved"):
    """A module or tensor cannot be measured."""

    probe: Annotated[str | None, "name of the probe, when it skips some of its tensors", OMIT_NONE] = None
    where: Annotated[str, "dotted path"]
    reason: Annotated[str, "reason"]


class ProbeDisabled(TypedEvent, kind="retired"):
    """A probe raises an exception and is disabled."""

    probe: Annotated[str, "name of the probe"]
    where: Annotated[str, "part of the probe"]
    error: Annotated[str, "class and message of the exception"]


class SwitchChanged(TypedEvent, kind="switch"):
    """A live switch is turned on or off, from this step on."""

    switch: Annotated[str, "name of the switch"]
    is_on: Annotated[bool, "its new state", Key("on")]
    by: Annotated[str, "`session`, `sonde switch`, `when …`, `profile written`, `an error` or `the end`"]


class ConditionMet(TypedEvent, kind="condition"):
    """A condition of `session.when` becomes true."""

    condition: Annotated[str, "text of the condition"]
    switches: Annotated[Sequence[str], "switches that it turns on", Key("then")]
    for_steps: Annotated[int, "number of steps"]


class TorchProfileWritten(TypedEvent, kind="profile"):
    """torch.profiler has recorded some steps, up to this one."""

    num_steps: Annotated[int, "recorded steps"]
    trace: Annotated[str, "trace file in the directory of the run"]
    ms_per_step: Annotated[Mapping[str, float], "self time of the five longest operations"]


class RecordedWithTool(TypedEvent, kind="tool_records"):
    """A tool of the session holds records when the session ends."""

    tool: Annotated[str, "name of the tool in the session"]
    text: Annotated[str, "one sentence about its records"]


class PlacementChanged(TypedEvent, kind="placement"):
    """`device_placement` is on and the devices change."""

    parameters: Annotated[Mapping[str, int], "number of parameters per device"]
    inputs: Annotated[Mapping[str, int], "number of input tensors per device"]
    optimizer_state: Annotated[Mapping[str, int], "number of optimizer state tensors per device"]


class TextLogged(TypedEvent, kind="log"):
    """`session.log` receives a text."""

    name: Annotated[str, "its name"]
    text: Annotated[str, "the text"]


class Ended(TypedEvent, kind="end"):
    """Last event of a run that is not killed."""

    how: Annotated[str, "`finished`, `exception`, `exit` or `interrupted`"]
    exit_code: Annotated[int | None, "exit code; null when the program ends with the session still open"]
    exception: Annotated[str, "class and message of the exception"]
    startup_ms: Annotated[float | None, "time that Sonde took to start: its imports, without torch, and its patches", OMIT_NONE] = None
    num_incidents: Annotated[int | None, "incidents that were searched for a cause", OMIT_NONE] = None
    incidents_ms: Annotated[float | None, "time that the training waited for these searches; no step contains it", OMIT_NONE] = None


EVENT_TYPES: tuple[type[TypedEvent], ...] = (
    Started, ModelWatched, OptimizerCreated, OwnershipChanged, CallSiteFound, BatchInspected, EvaluatedInTrainMode, StepProfile,
    TransfersMeasured, SchedulerCreated, SchedulerStarted, DataPass, EarlyStoppingUpdated, NonFinite, OriginFound, OriginUnknown,
    SpikeDetected, UpdateSkipped, StaleGradientsUsed, MemoryLimitFound, LeaksInvestigated, MemoryExhausted, FatalSignalReceived,
    FrameworkTrainingStarted, FrameworkEpochStarted, FrameworkTrainingEnded, TrackerConfigured, StepFailed, ModelOutputShape, NotMeasured,
    RecordedWithTool,
    ProbeDisabled, SwitchChanged, ConditionMet, TorchProfileWritten, PlacementChanged, TextLogged, Ended,
)  # fmt: skip
_TYPE_OF_KIND = {event_type.KIND: event_type for event_type in EVENT_TYPES}


# ---- encoding and decoding

_ABSENT: Any = object()
_OWN_FIELDS = frozenset(each.name for each in fields(TypedEvent))  # not part of the data in the log


@dataclass(frozen=True, slots=True)
class EventField:
    """One field of an event type, as the encoder, the decoder and the documentation use it."""

    name: str  # in Python
    key: str  # in the log
    type_name: str
    doc: str
    is_required: bool  # the writer always passes it
    is_omitted_when_none: bool
    accepts: Callable[[Any], bool]
    make_default: Callable[[], Any]  # for a log without this field


@functools.cache
def _arguments_of(event_type: Any) -> tuple[frozenset[str], dict[str, Any]]:
    """The names of the arguments without a default, and the defaults of the others except `extra`."""
    declared = fields(event_type)
    defaults = {each.name: each.default for each in declared if each.default is not MISSING}
    return frozenset(each.name for each in declared) - defaults.keys() - {"extra"}, defaults


@functools.cache
def event_fields(event_type: Any) -> tuple[EventField, ...]:
    """The fields of an event type in the order in which they are written. Resolved once, at the first use of the type."""
    hints = get_type_hints(event_type, include_extras=True)
    return tuple(_event_field(each, hints[each.name]) for each in fields(event_type) if each.name not in _OWN_FIELDS)


def _event_field(declared: Any, hint: Any) -> EventField:
    annotation, doc, *options = get_args(hint) if get_origin(hint) is Annotated else (hint, "")
    is_required = declared.default is MISSING
    return EventField(
        declared.name, next((str(option) for option in options if isinstance(option, Key)), declared.name), _type_name(annotation), doc,
        is_required, OMIT_NONE in options, _accepts(annotation), _empty_value(annotation) if is_required else lambda: declared.default,
    )  # fmt: skip


def encode(event: TypedEvent) -> tuple[str, dict[str, Any]]:
    """The kind and the data of an event, as the log stores them."""
    if isinstance(event, UnknownEvent):
        return event.kind, dict(event.extra)
    event_type: Any = type(event)
    values = ((each, getattr(event, each.name)) for each in event_fields(event_type))
    data = {each.key: value for each, value in values if value is not None or not each.is_omitted_when_none}
    return event.KIND, {**data, **event.extra}


def decode(kind: str, step: int, data: object) -> TypedEvent | UnreadableEvent:
    """The typed event of a kind, step and data that come from a log. Never raises. A missing field takes its default. A value of the wrong
    type makes the event unreadable. Unknown kinds and keys are kept in `extra`."""
    if not isinstance(kind, str) or not isinstance(data, Mapping):
        return UnreadableEvent(str(kind), step, "its kind is not a text or its data is not an object", data)
    event_type: Any = _TYPE_OF_KIND.get(kind)
    if event_type is None:
        return UnknownEvent(kind=kind, step=step, extra=data)
    values: dict[str, Any] = {}
    num_found = 0
    declared = event_fields(event_type)
    for each in declared:
        value = data.get(each.key, _ABSENT)
        if value is _ABSENT:
            value = each.make_default()
        elif each.accepts(value):
            num_found += 1
        else:
            return UnreadableEvent(kind, step, f"{each.key} should be {each.type_name} and is a {type(value).__name__}", data)
        values[each.name] = value
    if num_found < len(data):
        keys = {each.key for each in declared}
        values["extra"] = {key: value for key, value in data.items() if key not in keys}
    event: TypedEvent = event_type(step=step, **values)
    return event


def _accepts(annotation: Any) -> Callable[[Any], bool]:
    """A function that checks whether a value has this type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda value: True
    if origin in (Union, types.UnionType):
        options = tuple(map(_accepts, arguments))
        return lambda value: any(accepts(value) for accepts in options)
    if origin is Sequence:
        accepts_item = _accepts(arguments[0])
        return lambda value: isinstance(value, (list, tuple)) and all(map(accepts_item, value))
    if origin is Mapping:
        accepts_value = _accepts(arguments[1])
        return lambda value: isinstance(value, Mapping) and all(map(accepts_value, value.values()))
    return _ACCEPTS[annotation]


def _empty_value(annotation: Any) -> Callable[[], Any]:
    """Makes the value of a field that has no default and is missing in a log."""
    if type(None) in get_args(annotation):
        return lambda: None
    return _EMPTY_VALUES[get_origin(annotation) or annotation]


def _type_name(annotation: Any) -> str:
    """`list of str`, `float or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type_name, arguments))
    if origin is Sequence:
        return f"list of {_type_name(arguments[0])}"
    if origin is Mapping:
        return "object" if arguments[1] is Any else f"object of {_type_name(arguments[1])}"
    return "null" if annotation is type(None) else str(annotation.__name__)


_ACCEPTS: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    type(None): lambda value: value is None,
}
_EMPTY_VALUES: dict[Any, Callable[[], Any]] = {str: str, bool: bool, int: int, float: lambda: float("nan"), Sequence: tuple, Mapping: dict}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens once, as the log stores it; `typed` gives it as a dataclass of `EVENT_TYPES`."""

    kind: str
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)
    _decoded: TypedEvent | UnreadableEvent | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def typed(self) -> TypedEvent | UnreadableEvent:
        """The event as a dataclass: `UnknownEvent` for a kind that this version does not know, `UnreadableEvent` for damaged data."""
        if self._decoded is None:
            object.__setattr__(self, "_decoded", decode(self.kind, self.step, self.data))
        return self._decoded  # type: ignore[return-value] # set above


@dataclass(frozen=True, slots=True)
class Step:
    """All data of one step of one process: the input of a rule."""

    number: int
    rank: int
    scalars: Mapping[str, float]
    frames: Mapping[str, Frame]
    events: tuple[Event, ...]
    sites: Mapping[int, Site]

    def scalar(self, name: str, default: float = float("nan")) -> float:
        return self.scalars.get(name, default)

    def table(self, kind: str) -> list[tuple[Site, dict[str, float]]]:
        """The rows of a frame with their sites; empty when this kind is not measured in this step."""
        frame = self.frames.get(kind)
        if frame is None:
            return []
        rows = frame.values.T.tolist()
        return [(self.sites[i], dict(zip(frame.fields, row))) for i, row in zip(frame.sites.tolist(), rows) if i in self.sites]


class Severity(StrEnum):
    """The severities of findings, in ascending order."""

    INFO = "info"  # useful to know; does not change the verdict
    WARNING = "warning"  # probably a mistake
    ERROR = "error"  # results are wrong or much worse
    CRITICAL = "critical"  # the training does not learn anything useful

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """The conclusion of a rule, with its evidence."""

    rule: str  # names the defect; reads well after "found a …"
    severity: Severity
    where: str  # dotted module or parameter path, "" for the whole run
    step: int  # first step with this evidence
    cause: str  # one sentence, with numbers of the run
    fix: str  # one sentence: what to change
    evidence: Mapping[str, float | str] = field(default_factory=dict)
