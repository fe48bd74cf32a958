"""StabilityChecker: margins of tensors to overflow, underflow and precision loss, in their own dtype and in other formats."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sonde.errors import SondeError
from sonde.formatting import counted, number, percent, printable
from sonde.profiler.run_forward_pass import eval_mode_restored, forward_arguments, input_errors_explained
from sonde.render.plots import Plot
from sonde.render.plots.magnitude_plot import magnitudes as magnitude_plot
from sonde.render.summaries.tables import html_table, text_table
from sonde.statistics.find_tensors import find_tensors
from sonde.tools.hook_that_never_raises import SafeHook, require_module
from sonde.tools.tensors import floating_point_formats
from sonde.tools.tensors.describe_tensor import as_tensor
from sonde.tools.tensors.floating_point_formats import FORMATS, Magnitudes, Margins, NumberFormat, parse_format
from sonde.tools.tensors.tensors_of_run import Source, read_last_tensors

TARGETS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")  # formats that a model could be converted to
NEAR_OVERFLOW = 1.0  # powers of two: doubled values would overflow
FLUSHED_SHARE = 0.01  # of the non-zero numbers; even a normal distribution has a few near zero that do not matter
DENORMAL_SHARE = 0.10  # of the non-zero numbers; the tails of a softmax are a few percent
MIN_SPREAD_BITS = 2.0  # a standard deviation of four steps of the format: most variation is rounding
MAX_LOSS_SCALE_LOG2 = 24  # GradScaler starts at 2^16 and rarely exceeds this
SPARE_LOG2 = 3  # powers of two left free for other batches
MAX_ROWS = 40


@dataclass(frozen=True, slots=True)
class StabilityIssue:
    """One issue of one tensor in one format."""

    layer: str  # "tensor 3" if it was checked without a name
    kind: str  # "nan", "inf", "overflow", "underflow", "precision_loss" or "denormal"
    dtype: str  # the format that it is checked against, for instance "fp16"
    what: str  # "tensor", "output", "gradient of output" or "gradient"
    margin_log2: float  # powers of two to the limit, negative beyond it; -inf for NaN and Inf
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """The measurements of one tensor, with its margins in any format. Printed, it is a table of the margins and the issues."""

    layer: str  # "tensor 3" if it was checked without a name
    what: str
    in_use: NumberFormat | None  # None for dtypes without limits to check: integers, complex numbers
    measured: Magnitudes

    @property
    def name(self) -> str:
        return self.layer if self.layer.startswith(f"{self.what} ") else f"{self.what} of {self.layer}"

    @property
    def subject(self) -> str:
        """The name as the subject of a sentence: "the output of encoder", "tensor 1"."""
        return self.name if self.name == self.layer else f"the {self.name}"

    def __str__(self) -> str:
        stats = self.measured.stats
        lines = [printable(f"{self.name}: {stats}")]
        if not stats.unsupported:
            own = [] if self.in_use is None or self.in_use.name in TARGETS else [self.in_use.name]
            rows = []
            for name in [*own, *TARGETS]:
                if name in FORMATS:
                    margins = self.measured.margins_in(FORMATS[name])
                    known = not math.isinf(margins.overflow_log2)
                    cells = [f"{margins.overflow_log2:+.1f}", f"{margins.underflow_log2:+.0f}"] if known else ["none", "none"]
                    used = "in use" if self.in_use is not None and name == self.in_use.name else ""
                    rows.append([name, *cells, used])
            lines += ["margins in powers of two:", text_table(("", "overflow", "underflow", ""), rows)]
        return "\n".join([*lines, *(printable(issue.message) for issue in self.issues())])

    def margins(self, dtype: Any = None) -> Margins:
        """The margins in its own format, or in another: `margins("fp16").overflow_log2`."""
        target = parse_format(dtype) if dtype is not None else self.in_use
        if target is None:
            raise SondeError(f"The dtype of {self.name} has no limits to measure. Name a format, for instance margins('fp16').")
        return self.measured.margins_in(target)

    def issues(self, dtype: Any = None) -> list[StabilityIssue]:
        """The issues in its own format, or in another."""
        target = parse_format(dtype) if dtype is not None else self.in_use
        return list(_issues(self, target))


@dataclass(frozen=True, slots=True)
class FormatSafety:
    """Whether all checked tensors are safe in a format. Its truth value is the answer: `if checker.would_be_safe("fp16")`."""

    dtype: str
    num_checked: int
    overflow_log2: float  # the smallest margins of all tensors
    underflow_log2: float
    tightest: str  # name of the tensor with the smallest margin to overflow
    issues: tuple[StabilityIssue, ...]
    loss_scale_log2: int | None = None  # set if only gradients are too small: with this loss scale (as a power of two) they are safe

    def __bool__(self) -> bool:
        return not self.issues

    def __str__(self) -> str:
        if self:
            checked = counted(self.num_checked, "tensor") + (" that was checked" if self.num_checked == 1 else " that were checked")
            overflow = f"{number(self.overflow_log2)} powers of two to overflow (tightest: {self.tightest})"
            return f"{self.dtype} would be safe for the {checked}: {overflow}, {number(self.underflow_log2)} to underflow."
        lines = [f"{self.dtype} would not be safe: {counted(len(self.issues), 'issue')} in {counted(self.num_checked, 'tensor')}."]
        lines += [f"  {issue.message}" for issue in self.issues[:MAX_ROWS]]
        if len(self.issues) > MAX_ROWS:
            lines.append(f"  and {len(self.issues) - MAX_ROWS} more")
        if self.loss_scale_log2 is not None:
            lines.append(f"With a loss scale of 2^{self.loss_scale_log2} it would be.")
        return "\n".join(lines)


class StabilityChecker:
    """Checks tensors, or all outputs and gradients of a model. It stores statistics, no tensor."""

    def __init__(self) -> None:
        self.checked: list[CheckedTensor] = []

    @classmethod
    def from_run(cls, run: Source) -> Self:
        """Checks the parameters, gradients and outputs of a run, as they were in the last observed step."""
        checker = cls()
        for one in read_last_tensors(run):
            in_use = floating_point_formats.format_of_dtype(one.site.dtype)
            checker.checked.append(CheckedTensor(one.site.name or "the model", one.what, in_use, one.measured))
        return checker

    def check_tensor(self, tensor: Any, layer: str | None = None, *, what: str = "tensor") -> CheckedTensor:
        """Measures a tensor, array or list. Without `layer` it is named by its number: "tensor 1"."""
        plain = as_tensor(tensor)
        in_use, measured = floating_point_formats.format_of_tensor(plain), floating_point_formats.measure_magnitudes(plain)
        found = CheckedTensor(layer or f"{what} {len(self.checked) + 1}", what, in_use, measured)
        self.checked.append(found)
        return found

    def check_model(self, model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> list[StabilityIssue]:
        """Runs the model once in eval mode and checks the output of each leaf module. Returns the issues of this run in the current dtypes.
        With `loss`, a function of the output, gradients of outputs and of parameters are checked as well. The model is unchanged
        afterwards. `inputs`: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such batches."""
        model = require_module(model, "check_model", "For one tensor use check_tensor.")
        if loss is not None and not callable(loss):
            raise SondeError(f"loss must be a function, for instance lambda output: cross_entropy(output, targets), not {loss!r}.")
        before = len(self.checked)
        with eval_mode_restored(model), ExitStack() as hooks:
            for path, module in model.named_modules():
                if not module._modules:
                    path = path or type(module).__name__  # the model itself is the only layer
                    hook = SafeHook(f"the output of {path}", partial(self._on_output, path, loss is not None))
                    hooks.callback(module.register_forward_hook(hook).remove)
            for args, kwargs in forward_arguments(inputs):
                with torch.set_grad_enabled(loss is not None):
                    with input_errors_explained():
                        output = model(*args, **kwargs)
                    if loss is not None:
                        self._check_gradients(model, _scalar(loss, output))
        return [issue for one in self.checked[before:] for issue in one.issues()]

    def get_issues(self, dtype: Any = None) -> list[StabilityIssue]:
        """The issues of all checked tensors in their own dtypes, or in another, for instance "fp16"."""
        if dtype is not None:
            parse_format(dtype)  # an unknown name raises, also where nothing was checked
        return [issue for one in self.checked for issue in one.issues(dtype)]

    def would_be_safe(self, dtype: Any = "fp16") -> FormatSafety:
        """Whether all checked tensors fit into a format, with the margins in powers of two."""
        target = parse_format(dtype)
        if not self.checked:
            raise SondeError("Nothing was checked yet. Call check_tensor(tensor) or check_model(model, inputs) first.")
        margins = [(one.measured.margins_in(target), one.name) for one in self.checked if not one.measured.stats.unsupported]
        overflow, tightest = min(((each.overflow_log2, name) for each, name in margins), default=(math.inf, ""))
        underflow = min((each.underflow_log2 for each, _ in margins), default=math.inf)
        issues = tuple(self.get_issues(dtype))
        scale = self._loss_scale(target) if issues and all(issue.what.startswith("gradient") for issue in issues) else None
        return FormatSafety(target.name, len(self.checked), overflow, underflow, tightest, issues, scale)

    def plot(self, path: str | Path | None = None) -> Plot:
        """Plots the exponents of all checked tensors beside the range of each format, and marks those with NaN or Inf; writes the figure if
        there is a path."""
        rows: dict[str, dict[int, int]] = {}
        for one in self.checked:
            counts = rows.setdefault(one.name, {})
            for exponent, count in zip(one.measured.exponents, one.measured.counts):
                counts[exponent] = counts.get(exponent, 0) + count
        ranges = {name: (float(FORMATS[name].denormal_log2), float(FORMATS[name].normal_log2), FORMATS[name].max_log2) for name in TARGETS}
        plot = magnitude_plot(rows, ranges, name="magnitudes", notes=self._without_magnitude(rows))
        if path is not None:
            plot.save(path)
        return plot

    def _without_magnitude(self, rows: Mapping[str, Mapping[int, int]]) -> dict[str, str]:
        """By name: the numbers of NaN and Inf, or why there is no magnitude at all."""
        notes: dict[str, str] = {}
        for one in self.checked:
            stats = one.measured.stats
            if bad := [f"{count:,} {word}" for count, word in ((stats.nan, "NaN"), (stats.inf, "Inf")) if count]:
                notes[one.name] = ", ".join(bad)
            elif not rows[one.name]:
                notes[one.name] = "not measured" if stats.unsupported else "all zero" if stats.num else "empty"
        return notes

    def clear(self) -> None:
        """Drops all measurements."""
        self.checked.clear()

    def summary(self) -> str:
        """A table of all checked tensors, with their margins in their own dtype and in other formats."""
        return "\n".join([text_table(_HEAD, self._rows()), *self._notes()])

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows(), title=_TITLE, notes=self._notes())

    def _loss_scale(self, target: NumberFormat) -> int | None:
        """The largest loss scale, as a power of two with some margin, that makes every gradient safe; None if there is none."""
        gradients = [one for one in self.checked if one.what.startswith("gradient") and one.measured.counts]
        margin = min((one.measured.margins_in(target).overflow_log2 for one in gradients), default=0.0)
        log2 = min(MAX_LOSS_SCALE_LOG2, math.floor(margin) - SPARE_LOG2)
        scaled = [CheckedTensor(one.layer, one.what, one.in_use, one.measured.scaled(log2)) for one in gradients]
        return log2 if log2 > 0 and not any(issue for one in scaled for issue in _issues(one, target)) else None

    def _notes(self) -> list[str]:
        hidden = len(self.checked) - MAX_ROWS
        more = [f"and {counted(hidden, 'more tensor')}"] if hidden > 0 else []
        return [*more, *(issue.message for issue in self.get_issues()[:MAX_ROWS])]

    def _rows(self) -> list[list[str]]:
        rows = []
        for one in self.checked[:MAX_ROWS]:
            if one.measured.stats.unsupported:
                rows.append([one.name, one.measured.stats.unsupported, *[""] * len(TARGETS)])
                continue
            own = one.in_use.name if one.in_use is not None else "other"
            targets = [_margins(FORMATS.get(to), one.measured) for to in TARGETS]
            rows.append([one.name, f"{own} {_margins(one.in_use, one.measured)}", *targets])
        return rows

    def _on_output(self, path: str, with_gradients: bool, module: nn.Module, args: Any, output: Any) -> None:
        for place, tensor in find_tensors(output):
            name = path if place == "0" else f"{path}:{place}"
            self.check_tensor(tensor, name, what="output")
            if with_gradients and tensor.requires_grad:
                hook = SafeHook(f"the gradient of {name}", partial(self.check_tensor, layer=name, what="gradient of output"))
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _check_gradients(self, model: nn.Module, loss: Tensor) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        # Not backward(): that would write into .grad.
        found = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
        for (name, _), gradient in zip(named, found):
            if gradient is not None:
                self.check_tensor(gradient, name, what="gradient")


_TITLE = "margins in powers of two: to overflow / to underflow"
_HEAD = ("tensor", "in use", *TARGETS)


def _margins(target: NumberFormat | None, measured: Magnitudes) -> str:
    if target is None:
        return ""
    margins = measured.margins_in(target)
    return "no numbers" if math.isinf(margins.overflow_log2) else f"{margins.overflow_log2:+.1f} / {margins.underflow_log2:+.0f}"


def _scalar(loss: Callable[[Any], Tensor], output: Any) -> Tensor:
    value = loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        example = "loss=lambda output: cross_entropy(output, targets)"
        raise SondeError(f"The loss function must return one number that depends on the parameters, for instance {example}.")
    return value.reshape(())


def _issues(one: CheckedTensor, target: NumberFormat | None) -> Iterator[StabilityIssue]:
    stats = one.measured.stats
    format_name = target.name if target is not None else "its dtype"

    def issue(kind: str, margin_log2: float, message: str) -> StabilityIssue:
        return StabilityIssue(one.layer, kind, format_name, one.what, margin_log2, f"{message[0].upper()}{message[1:]}")

    if stats.unsupported:
        return
    for kind, count, word in (("nan", stats.nan, "NaN"), ("inf", stats.inf, "Inf")):
        if count:
            yield issue(kind, -math.inf, f"{one.subject} holds {count:,} {word} among {counted(stats.num, 'number')}.")
    if target is None or not one.measured.counts:
        return
    margins = one.measured.margins_in(target)
    is_own = one.in_use == target
    # Eight-bit tensors are scaled up to the limit of their format on purpose.
    nearest = 0.0 if is_own and target.mantissa_bits <= 3 else NEAR_OVERFLOW
    if margins.overflow_log2 < nearest:
        side = "beyond" if margins.overflow_log2 < 0 else "from"
        distance = f"{abs(margins.overflow_log2):.1f} powers of two {side} the largest number of {format_name} ({number(target.max)})"
        yield issue("overflow", margins.overflow_log2, f"{one.subject} reaches {number(stats.max_abs)}, {distance}.")
    lost = margins.flushed_share
    is_mostly_denormal = is_own and margins.denormal_share >= 0.5  # smaller numbers have already become zero
    if lost >= FLUSHED_SHARE or is_mostly_denormal:
        detail = f"{percent(lost)} of its non-zero numbers become zero" if lost >= FLUSHED_SHARE else "most of its numbers are denormal"
        smallest = f"the smallest number is 2^{target.denormal_log2}"
        yield issue("underflow", margins.underflow_log2, f"{one.subject} is too small for {format_name}: {detail}; {smallest}.")
    if margins.denormal_share >= DENORMAL_SHARE:
        which = f"{percent(margins.denormal_share)} of the non-zero numbers of {one.subject}"
        effect = f"denormal in {format_name} (below 2^{target.normal_log2}): they have fewer digits, and some processors handle them slowly"
        yield issue("denormal", margins.underflow_log2 - target.mantissa_bits, f"{which} are {effect}.")
    if margins.spread_bits < MIN_SPREAD_BITS and lost < FLUSHED_SHARE:
        spread = f"{one.subject} varies by {number(stats.std)} around {number(stats.mean)}"
        steps = f"where {format_name} has steps of {number(stats.std / 2**margins.spread_bits)}: most of the variation is rounding"
        yield issue("precision_loss", margins.spread_bits, f"{spread}, {steps}.")
