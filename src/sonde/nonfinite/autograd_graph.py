"""The graph of a bad loss: what autograd has saved for the backward tells which operation was given good numbers and made bad ones.

Less than a second run can tell, but it is there when nothing can be run again: the names of operations and some of their inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import is_finite

MAX_NODES = 20_000

# By the name of the node: what among the saved inputs makes the result bad, and how to say it.
_BAD: dict[str, tuple[str, Callable[[Tensor], Tensor], str, str, str]] = {
    "log": ("self", lambda x: x <= 0, "values at or below zero", "log-of-zero", "clamp what goes into the logarithm"),
    "log2": ("self", lambda x: x <= 0, "values at or below zero", "log-of-zero", "clamp what goes into the logarithm"),
    "log10": ("self", lambda x: x <= 0, "values at or below zero", "log-of-zero", "clamp what goes into the logarithm"),
    "log1p": ("self", lambda x: x <= -1, "values at or below -1", "log-of-zero", "clamp what goes into the logarithm"),
    "div": ("other", lambda x: x == 0, "zeros below the line", "division-by-zero", "add a small number to the divisor"),
    "rsqrt": ("result", lambda x: ~x.isfinite(), "infinite results", "division-by-zero", "add a small number under the root"),
    "reciprocal": ("result", lambda x: ~x.isfinite(), "infinite results", "division-by-zero", "add a small number to the divisor"),
    "sqrt": ("result", lambda x: x.isnan(), "roots of negative numbers", "sqrt-of-negative", "clamp what goes into the root at zero"),
    "exp": ("result", lambda x: x.isinf(), "overflows", "exp-overflow", "subtract the largest value before the exponential"),
    "softmax": ("result", lambda x: x.isnan(), "results without a number", "masked-row", "leave one value per row unmasked"),
    "logsoftmax": ("result", lambda x: x.isnan(), "results without a number", "masked-row", "leave one value per row unmasked"),
}


# Where both factors are saved, the result can be made again.
_FACTORS: dict[str, tuple[str, str, Callable[[Any, Any], Tensor]]] = {
    "mul": ("self", "other", torch.mul),
    "mm": ("self", "mat2", torch.mm),
    "bmm": ("self", "mat2", torch.bmm),
    "pow": ("self", "exponent", torch.pow),
}
# A bad number that these are given is in what they put out. Others may be given an Inf that is meant: a maximum, a softmax, logsumexp.
_SPREADS = frozenset(
    {"mul", "div", "mm", "bmm", "addmm", "convolution", "mseloss", "l1loss", "smoothl1loss", "huberloss", "binarycrossentropy"}
)
_INPUTS = ("self", "other", "mat1", "mat2", "input", "target", "weight")  # what operations call that which they are given

MAX_WORK = 1 << 24  # numbers among the factors: more are not multiplied again
CAVEAT = "read from the graph of the loss: line and module are not known"


def origin_in_graph(loss: Tensor) -> Origin | None:
    """The earliest operation in the graph of the loss that is known to have made a bad number, or to have been given one."""
    kind = "nan" if bool(loss.isnan().any()) else "inf"
    for node in sorted(_nodes(loss), key=lambda node: int(node._sequence_nr())):
        operation = _operation(node)
        with torch.no_grad():
            told = _made(node, operation) or _given(node, operation)
        if told is not None:
            phase, cause, fix, key = told
            return Origin(kind, phase, operation, "", "", "", cause, fix, key, how="graph", caveats=(CAVEAT,))
    return None


def _made(node: Any, operation: str) -> tuple[str, str, str, str] | None:
    """Phase, cause, fix and key where this operation made a bad number out of good ones."""
    known, factors = _BAD.get(operation), _FACTORS.get(operation)
    if known is not None:
        saved = _saved(node, known[0])
        num = int(known[1](saved).sum()) if saved is not None and (known[0] == "result" or is_finite(saved)) else 0
        if saved is not None and num:
            return "forward", f"{operation} met {num:,} {known[2]} among {saved.numel():,} values", known[4], known[3]
    elif factors is not None:
        one = _saved(node, factors[0])
        other = _saved(node, factors[1]) if operation != "pow" else getattr(node, "_saved_exponent", None)
        if one is None or other is None or one.numel() > MAX_WORK:
            return None
        if not is_finite(one) or (isinstance(other, Tensor) and not is_finite(other)):
            return None
        num = int((~factors[2](one, other).isfinite()).sum())
        if num:
            size = float(one.abs().max())
            cause = f"{operation} of {one.numel():,} values up to {size:.3g} makes {num:,} that leave the range of their type"
            return "forward", cause, "keep what goes into it small: normalise it, clip it, or compute with logarithms", "overflow"
    return None


def _given(node: Any, operation: str) -> tuple[str, str, str, str] | None:
    """The same where a bad number went into this operation: nothing before it in the graph is known to have made it."""
    for name in _INPUTS if operation in _SPREADS else ():
        saved = _saved(node, name)
        if saved is not None and not is_finite(saved):
            nan, inf = int(saved.isnan().sum()), int(saved.isinf().sum())
            bad = " and ".join(f"{num:,} {what}" for num, what in ((nan, "NaN"), (inf, "Inf")) if num)
            cause = f"{bad} among {saved.numel():,} values were given to {operation}"
            fix = "look where these numbers come from: data with missing values, a state of your own, or an operation before this one"
            return "input", cause, fix, "nan-input"
    return None


def _operation(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2]).lower()


def _saved(node: Any, name: str) -> Tensor | None:
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # freed by an earlier backward
        return None
    return value.detach() if isinstance(value, Tensor) and value.is_floating_point() else None


def _nodes(loss: Tensor) -> Iterator[Any]:
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [below for below, _ in node.next_functions]
