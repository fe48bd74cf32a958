"""The graph of a bad loss: what autograd has saved for the backward tells which operation was given good numbers and made bad ones.

Less than a second run can tell, but it is there when nothing can be run again: the names of operations and some of their inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sonde.forensics.origin import Origin
from sonde.forensics.tracer import is_finite

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


def origin_in_graph(loss: Tensor) -> Origin | None:
    """The earliest operation in the graph of the loss that is known to have made a bad number."""
    for node in sorted(_nodes(loss), key=lambda node: int(node._sequence_nr())):
        operation = _operation(node)
        known = _BAD.get(operation)
        saved = _saved(node, known[0]) if known else None
        if known is None or saved is None or (known[0] != "result" and not is_finite(saved)):
            continue
        with torch.no_grad():
            num = int(known[1](saved).sum())
        if num:
            kind = "nan" if bool(loss.isnan().any()) else "inf"
            cause = f"{operation} met {num:,} {known[2]} among {saved.numel():,} values"
            caveat = "read from the graph of the loss: line and module are not known"
            return Origin(kind, "forward", operation, "", "", "", cause, known[4], known[3], how="graph", caveats=(caveat,))
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
