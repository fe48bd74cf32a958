"""Reads the origin of a non-finite loss from its autograd graph: which operation saved finite inputs and a non-finite result.

Used if the step cannot be replayed. It finds less than a trace: operation names and some of their inputs, no lines and no modules.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sonde.leaks.autograd_graphs_alive import graph_nodes
from sonde.nonfinite.explain_forward import Explanation
from sonde.nonfinite.operation_tracer import is_finite
from sonde.nonfinite.origin_types import Origin
from sonde.statistics.private_torch_api import node_sequence_nr, saved_value, saved_value_handle

MAX_NODES = 20_000
MAX_FACTOR_SIZE = 1 << 24  # elements: larger factors are not multiplied again
CAVEAT = "read from the graph of the loss: line and module are not known"

_Read = Callable[[Any, str], Tensor | None]  # a saved tensor of a node


class _DomainCheck(NamedTuple):
    """The saved values of an operation that make its result non-finite, and what to report about them."""

    saved: str
    is_bad: Callable[[Tensor], Tensor]
    values: str
    key: str
    fix: str


def _is_nonfinite(x: Tensor) -> Tensor:
    return ~x.isfinite()


_LOG = _DomainCheck("self", lambda x: x <= 0, "values at or below zero", "log-of-zero", "clamp what goes into the logarithm")
_SOFTMAX = _DomainCheck("result", torch.isnan, "results without a number", "masked-row", "leave one value per row unmasked")
_DOMAIN_CHECKS = {
    "log": _LOG,
    "log2": _LOG,
    "log10": _LOG,
    "log1p": _LOG._replace(is_bad=lambda x: x <= -1, values="values at or below -1"),
    "div": _DomainCheck("other", lambda x: x == 0, "zeros below the line", "division-by-zero", "add a small number to the divisor"),
    "rsqrt": _DomainCheck("result", _is_nonfinite, "infinite results", "division-by-zero", "add a small number under the root"),
    "reciprocal": _DomainCheck("result", _is_nonfinite, "infinite results", "division-by-zero", "add a small number to the divisor"),
    "sqrt": _DomainCheck("result", torch.isnan, "roots of negative numbers", "sqrt-of-negative", "clamp what goes into the root at zero"),
    "exp": _DomainCheck("result", torch.isinf, "overflows", "exp-overflow", "subtract the largest value before the exponential"),
    "softmax": _SOFTMAX,
    "logsoftmax": _SOFTMAX,
}
# Both operands are saved, so the result can be computed again: the name of the second one (the first is "self"), and the function.
_RECOMPUTED: Mapping[str, tuple[str, Callable[[Any, Any], Tensor]]] = {
    "mul": ("other", torch.mul), "mm": ("mat2", torch.mm), "bmm": ("mat2", torch.bmm), "pow": ("exponent", torch.pow),
}  # fmt: skip
# A non-finite input of these is also in their output. Others may get an Inf on purpose: a maximum, a softmax, logsumexp.
_PROPAGATING_OPS = frozenset(
    {"mul", "div", "mm", "bmm", "addmm", "convolution", "mseloss", "l1loss", "smoothl1loss", "huberloss", "binarycrossentropy"}
)
_INPUT_NAMES = ("self", "other", "mat1", "mat2", "input", "target", "weight")


def origin_in_graph(loss: Tensor, *, unpacks: bool = True) -> Origin | None:
    """The earliest operation in the graph of the loss that is known to have created a non-finite value, or to have received one. Without
    `unpacks`, tensors that a hook packed are not read: unpacking runs the user's code, and with checkpointing the whole forward."""
    read = _saved_tensor if unpacks else _tensor_without_hook
    kind = "nan" if bool(loss.isnan().any()) else "inf"
    for node in sorted(graph_nodes(loss.grad_fn, MAX_NODES), key=node_sequence_nr):
        operation = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2]).lower()
        with torch.no_grad():
            created = _created(node, operation, read)
            found = created or _received(node, operation, read)
        if found is not None:
            phase = "forward" if created else "input"
            return Origin(kind, phase, operation, "", "", "", **found._asdict(), how="graph", caveats=(CAVEAT,))
    return None


def _created(node: Any, operation: str, read: _Read) -> Explanation | None:
    """The explanation if this operation created a non-finite value from finite inputs."""
    check = _DOMAIN_CHECKS.get(operation)
    if check is not None:
        saved = read(node, check.saved)
        num = int(check.is_bad(saved).sum()) if saved is not None and (check.saved == "result" or is_finite(saved)) else 0
        if saved is not None and num:
            cause = f"{operation} met {num:,} {check.values} among {saved.numel():,} values"
            return Explanation(check.key, cause, check.fix)
    elif operation in _RECOMPUTED:
        name, compute = _RECOMPUTED[operation]
        first = read(node, "self")
        second: Any = read(node, name) if operation != "pow" else saved_value(node, "exponent")
        if first is None or second is None or first.numel() > MAX_FACTOR_SIZE:
            return None
        if not is_finite(first) or (isinstance(second, Tensor) and not is_finite(second)):
            return None
        if num := int(_is_nonfinite(compute(first, second)).sum()):
            size = float(first.abs().max())
            cause = f"{operation} of {first.numel():,} values up to {size:.3g} makes {num:,} that leave the range of their type"
            return Explanation("overflow", cause, "keep what goes into it small: normalize it, clip it, or compute with logarithms")
    return None


def _received(node: Any, operation: str, read: _Read) -> Explanation | None:
    """The explanation if an input of this operation is non-finite, and no earlier node in the graph is known to have created it."""
    for name in _INPUT_NAMES if operation in _PROPAGATING_OPS else ():
        saved = read(node, name)
        if saved is not None and not is_finite(saved):
            nan, inf = int(saved.isnan().sum()), int(saved.isinf().sum())
            bad = " and ".join(f"{num:,} {what}" for num, what in ((nan, "NaN"), (inf, "Inf")) if num)
            cause = f"{bad} among {saved.numel():,} values were given to {operation}"
            fix = "look where these numbers come from: data with missing values, a state of your own, or an operation before this one"
            return Explanation("nan-input", cause, fix)
    return None


def _saved_tensor(node: Any, name: str) -> Tensor | None:
    try:
        value = saved_value(node, name)
    except RuntimeError:  # freed by an earlier backward
        return None
    return value.detach() if isinstance(value, Tensor) and value.is_floating_point() else None


def _tensor_without_hook(node: Any, name: str) -> Tensor | None:
    handle = saved_value_handle(node, name)
    return _saved_tensor(node, name) if getattr(handle, "unpack_hook", handle) is None and handle is not None else None
