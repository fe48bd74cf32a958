"""How far numbers are from where they break: overflow, underflow, lost digits, in the dtype in use and in those one could move to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sonde.errors import SondeError
from sonde.rules.words import number
from sonde.statistics.tensor_utils import find_tensors
from sonde.tools.fast_statistics import as_tensor
from sonde.tools.next_layers import batches, untouched
from sonde.tools.number_formats import FORMATS, Format, Magnitudes, Margins, format_named, format_of, magnitudes
from sonde.tools.safe_hook import Contained
from sonde.views.numbers import counted, percent
from sonde.views.plots import Plot
from sonde.views.plots.magnitudes import magnitudes as magnitude_plot
from sonde.views.table import html_table, text_table

KINDS = ("nan", "inf", "overflow", "underflow", "precision_loss", "denormal")
MOVES = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")  # formats that one could move to
NEAR_OVERFLOW = 1.0  # powers of two: the next doubling would overflow
FLUSHED_SHARE = 0.01  # of the non-zero numbers; even normally distributed ones have a few near zero, which nobody misses
DENORMAL_SHARE = 0.10  # of the non-zero numbers; the far tails of a softmax are a few per cent
FEWEST_BITS = 2.0  # a deviation of four steps of the format: what varies is mostly rounding
MAX_LOSS_SCALE_LOG2 = 24  # GradScaler starts at 2^16 and rarely goes further than this
SPARE_LOG2 = 3  # powers of two that other batches may need more
MAX_ROWS = 40


@dataclass(frozen=True, slots=True)
class StabilityIssue:
    """One thing that is wrong with one tensor in one format."""

    layer: str  # "" where none was named
    kind: str  # one of KINDS
    dtype: str  # the format it is judged against: "fp16"
    what: str  # "tensor", "output", "gradient of output" or "gradient"
    margin_log2: float  # powers of two to the edge, negative beyond it; -inf where it has happened (nan, inf)
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Checked:
    """One tensor: what was measured of it, and its margins in any format."""

    layer: str
    what: str
    in_use: Format | None  # None where the dtype has no edges that are judged: integers, complex numbers
    measured: Magnitudes

    @property
    def name(self) -> str:
        return f"{self.what} of {self.layer}" if self.layer else self.what

    def margins(self, dtype: Any = None) -> Margins:
        """In the format in use, or in another: `margins("fp16").overflow_log2`."""
        target = format_named(dtype) if dtype is not None else self.in_use
        if target is None:
            raise SondeError(f"The dtype of {self.name} has no edges to measure. Name a format, for instance margins('fp16').")
        return self.measured.within(target)

    def issues(self, dtype: Any = None) -> list[StabilityIssue]:
        """What is wrong in the format in use, or would be in another."""
        target = format_named(dtype) if dtype is not None else self.in_use
        return list(_issues(self, target))


@dataclass(frozen=True, slots=True)
class Safety:
    """Whether everything that was checked would be safe in a format. True where it would: `if checker.would_be_safe("fp16")`."""

    dtype: str
    num_checked: int
    overflow_log2: float  # the smallest margins of all
    underflow_log2: float
    tightest: str  # which tensor has the smallest margin to overflow
    issues: tuple[StabilityIssue, ...]
    loss_scale_log2: int | None = None  # gradients alone are too small, and multiplied by this power of two they would be safe

    def __bool__(self) -> bool:
        return not self.issues

    def __str__(self) -> str:
        if self:
            checked = counted(self.num_checked, "tensor") + (" that was checked" if self.num_checked == 1 else " that were checked")
            overflow, underflow = number(self.overflow_log2), number(self.underflow_log2)
            return (
                f"{self.dtype} would be safe for the {checked}: {overflow} powers of two to overflow (at the {self.tightest}), "
                f"{underflow} to underflow."
            )
        return "\n".join(
            [
                f"{self.dtype} would not be safe: {counted(len(self.issues), 'issue')} in {counted(self.num_checked, 'tensor')}.",
                *(f"  {issue.message}" for issue in self.issues[:MAX_ROWS]),
                *([f"  and {len(self.issues) - MAX_ROWS} more"] if len(self.issues) > MAX_ROWS else []),
                *([f"With a loss scale of 2^{self.loss_scale_log2} it would be."] if self.loss_scale_log2 is not None else []),
            ]
        )


class StabilityChecker:
    """Checks tensors, or everything that flows through a model. Numbers are kept, never a tensor."""

    def __init__(self) -> None:
        self.checked: list[Checked] = []

    def check_tensor(self, tensor: Any, layer: str | None = None, *, what: str = "tensor") -> Checked:
        """Measure a tensor, array or list as it is now."""
        plain = as_tensor(tensor)
        found = Checked(layer or "", what, format_of(plain), magnitudes(plain))
        self.checked.append(found)
        return found

    def check_model(self, model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> list[StabilityIssue]:
        """Run the model once and check what each of its leaf modules puts out; returns the issues of this run in the dtypes in use.

        With `loss`, a function of the model's output, gradients of outputs and of parameters are checked as well. The model runs in
        eval mode with the random state put back; parameters, their `.grad`, buffers and modes are as before.
        `inputs` is what forward takes: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such batches.
        """
        if not isinstance(model, nn.Module):
            raise SondeError(f"check_model takes a torch.nn.Module, not a {type(model).__name__}. For one tensor use check_tensor.")
        model = getattr(model, "_orig_mod", model)
        before = len(self.checked)
        with untouched(model), ExitStack() as hooks:
            for path, module in model.named_modules():
                if not module._modules:
                    hook = Contained(f"the output of {path}", partial(self._output, path, loss is not None))
                    hooks.callback(module.register_forward_hook(hook).remove)
            for args, kwargs in batches(inputs):
                with torch.set_grad_enabled(loss is not None):
                    try:
                        output = model(*args, **kwargs)
                    except Exception as error:
                        raise SondeError(
                            f"The model could not be run with these inputs: {type(error).__name__}: {error}.\n"
                            "Give what its forward takes: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of these."
                        ) from error
                    if loss is not None:
                        self._gradients(model, _scalar(loss, output))
        return [issue for one in self.checked[before:] for issue in one.issues()]

    def get_issues(self, dtype: Any = None) -> list[StabilityIssue]:
        """What is wrong with everything checked so far, in the dtypes in use; or what would be in another, for instance "fp16"."""
        return [issue for one in self.checked for issue in one.issues(dtype)]

    def would_be_safe(self, dtype: Any = "fp16") -> Safety:
        """Whether everything checked so far could be held in this format, with the margins in powers of two."""
        target = format_named(dtype)
        if not self.checked:
            raise SondeError("Nothing was checked yet. Call check_tensor(tensor) or check_model(model, inputs) first.")
        margins = [(one.measured.within(target), one.name) for one in self.checked if not one.measured.stats.unsupported]
        overflow, tightest = min(((each.overflow_log2, name) for each, name in margins), default=(math.inf, ""))
        underflow = min((each.underflow_log2 for each, _ in margins), default=math.inf)
        issues = tuple(self.get_issues(dtype))
        scale = self._loss_scale(target) if issues and all(issue.what.startswith("gradient") for issue in issues) else None
        return Safety(target.name, len(self.checked), overflow, underflow, tightest, issues, scale)

    def plot(self, path: str | Path | None = None) -> Plot:
        """Where the numbers of everything checked lie among the powers of two, beside what each format holds."""
        rows: dict[str, dict[int, int]] = {}
        for one in self.checked:
            counts = rows.setdefault(one.name, {})
            for exponent, count in zip(one.measured.exponents, one.measured.counts):
                counts[exponent] = counts.get(exponent, 0) + count
        ranges = {name: (float(FORMATS[name].denormal_log2), float(FORMATS[name].normal_log2), FORMATS[name].max_log2) for name in MOVES}
        picture = magnitude_plot(rows, ranges, name="magnitudes")
        if path is not None:
            picture.save(path)
        return picture

    def clear(self) -> None:
        self.checked.clear()

    def summary(self) -> str:
        """Every tensor that was checked, with its margins in the dtype in use and in those one could move to."""
        rows, more = self._rows()
        return "\n".join([text_table(_HEAD, rows), *([more] if more else []), *(issue.message for issue in self.get_issues()[:MAX_ROWS])])

    def _repr_html_(self) -> str:
        rows, more = self._rows()
        return html_table(_HEAD, rows, title=_TITLE, notes=[*([more] if more else []), *(str(one) for one in self.get_issues()[:MAX_ROWS])])

    def _loss_scale(self, target: Format) -> int | None:
        """The largest power of two, with some room left, that makes every gradient safe; None where there is none."""
        gradients = [one for one in self.checked if one.what.startswith("gradient") and one.measured.counts]
        room = min((one.measured.within(target).overflow_log2 for one in gradients), default=0.0)
        log2 = min(MAX_LOSS_SCALE_LOG2, math.floor(room) - SPARE_LOG2)
        lifted = [Checked(one.layer, one.what, one.in_use, one.measured.scaled(log2)) for one in gradients]
        return log2 if log2 > 0 and not any(issue for one in lifted for issue in _issues(one, target)) else None

    def _rows(self) -> tuple[list[list[str]], str]:
        rows = []
        for one in self.checked[:MAX_ROWS]:
            if one.measured.stats.unsupported:
                rows.append([one.name, one.measured.stats.unsupported, *[""] * len(MOVES)])
                continue
            own = one.in_use.name if one.in_use is not None else "other"
            moves = [_margins(FORMATS.get(to), one.measured) for to in MOVES]
            rows.append([one.name, f"{own} {_margins(one.in_use, one.measured)}", *moves])
        hidden = len(self.checked) - len(rows)
        return rows, f"and {counted(hidden, 'more tensor')}" if hidden else ""

    def _output(self, path: str, with_gradients: bool, module: nn.Module, args: Any, output: Any) -> None:
        for place, tensor in find_tensors(output):
            name = path if place == "0" else f"{path}:{place}"
            self.check_tensor(tensor, name, what="output")
            if with_gradients and tensor.requires_grad:
                hook = Contained(f"the gradient of {name}", partial(self.check_tensor, layer=name, what="gradient of output"))
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradients(self, model: nn.Module, loss: Tensor) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        # Not backward(): that would write into .grad.
        found = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
        for (name, _), gradient in zip(named, found):
            if gradient is not None:
                self.check_tensor(gradient, name, what="gradient")


_TITLE = "margins in powers of two: to overflow / to underflow"
_HEAD = ("tensor", "in use", *MOVES)


def _margins(target: Format | None, measured: Magnitudes) -> str:
    if target is None:
        return ""
    margins = measured.within(target)
    return "no numbers" if math.isinf(margins.overflow_log2) else f"{margins.overflow_log2:+.1f} / {margins.underflow_log2:+.0f}"


def _scalar(loss: Callable[[Any], Tensor], output: Any) -> Tensor:
    value = loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise SondeError(
            "The loss function must give one number that depends on the parameters, "
            "for instance loss=lambda output: cross_entropy(output, targets)."
        )
    return value.reshape(())


def _issues(one: Checked, target: Format | None) -> Iterator[StabilityIssue]:
    stats = one.measured.stats
    label = target.name if target is not None else "its dtype"

    def issue(kind: str, margin_log2: float, message: str) -> StabilityIssue:
        return StabilityIssue(one.layer, kind, label, one.what, margin_log2, f"{message[0].upper()}{message[1:]}")

    if stats.unsupported:
        return
    for kind, count, word in (("nan", stats.nan, "NaN"), ("inf", stats.inf, "Inf")):
        if count:
            yield issue(kind, -math.inf, f"the {one.name} holds {count:,} {word} among {counted(stats.num, 'number')}.")
    if target is None or not one.measured.counts:
        return
    margins = one.measured.within(target)
    is_own = one.in_use == target
    # Eight-bit tensors are scaled up to the edge on purpose.
    nearest = 0.0 if is_own and target.mantissa_bits <= 3 else NEAR_OVERFLOW
    if margins.overflow_log2 < nearest:
        side = "beyond" if margins.overflow_log2 < 0 else "from"
        yield issue(
            "overflow",
            margins.overflow_log2,
            f"the {one.name} reaches {number(stats.max_abs)}, {abs(margins.overflow_log2):.1f} powers of two {side} the largest number "
            f"of {label} ({number(target.max)}).",
        )
    lost = margins.flushed_share
    bottom = is_own and margins.denormal_share >= 0.5  # what was flushed is zero already: the rest stands at the edge
    if lost >= FLUSHED_SHARE or bottom:
        told = f"{percent(lost)} of its non-zero numbers become zero" if lost >= FLUSHED_SHARE else "most of its numbers are denormal"
        yield issue(
            "underflow",
            margins.underflow_log2,
            f"the {one.name} is too small for {label}: {told}; the smallest number is 2^{target.denormal_log2}.",
        )
    if margins.denormal_share >= DENORMAL_SHARE:
        yield issue(
            "denormal",
            margins.underflow_log2 - target.mantissa_bits,
            f"{percent(margins.denormal_share)} of the non-zero numbers of the {one.name} are denormal in {label} (below "
            f"2^{target.normal_log2}): they have fewer digits, and some processors are slow with them.",
        )
    if margins.spread_bits < FEWEST_BITS and lost < FLUSHED_SHARE:
        yield issue(
            "precision_loss",
            margins.spread_bits,
            f"the {one.name} varies by {number(stats.std)} around {number(stats.mean)}, where {label} has steps of "
            f"{number(stats.std / 2**margins.spread_bits)}: most of what varies is rounding.",
        )
