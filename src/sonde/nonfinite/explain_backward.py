"""Explains why a backward output a NaN or an Inf: the gradient of the forward operation is infinite at values where its result is finite.

`BadOp.tensors` holds what the forward saved (`saved self`, `saved result` …), then the arguments of the backward operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sonde.nonfinite.explain_forward import BadOp, Explanation, count, count_phrase, explain_by_values, log_fix, max_abs


def explain_backward(op: BadOp, forward_name: str) -> Explanation:
    """The cause and the fix of an operation in the backward of `forward_name` that output a non-finite value."""
    check = BACKWARD_TABLE.get(forward_name, _float16_overflow)
    return check(op, forward_name) or explain_by_values(op, f"the backward of {forward_name}")


def explain_masked(explanation: Explanation, operation: str) -> Explanation:
    """The explanation if where() selected the other branch: the incoming gradient is 0 there, and 0 times Inf is NaN."""
    return Explanation(
        "nan-grad-where",
        f"{explanation.cause}; where() hides these values in the forward, but their gradient is 0 times Inf",
        f"make the input of {operation} safe before it: x = torch.where(ok, x, 1.0), then where(ok, {operation}(x), other)",
    )


def _saved(op: BadOp, *names: str) -> Tensor | None:
    return next((op.tensors[f"saved {name}"] for name in names if f"saved {name}" in op.tensors), None)


def _zero_argument(op: BadOp) -> Tensor | None:
    """An argument of the backward operation that holds a zero; used if no tensor was saved under a known name."""
    return next((tensor for name, tensor in op.tensors.items() if name in ("other", "input") and (tensor == 0).any()), None)


def _sqrt(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "result", "self")
    x = x if x is not None else _zero_argument(op)
    if x is not None and (negative := count(x.isnan())):  # its result was NaN, and was discarded
        return Explanation(
            "sqrt-of-negative",
            f"{operation} of {count_phrase(negative, x, 'negative values')} has no slope",
            "clamp(min=1e-12) before the root",
        )
    if x is None or not (zeros := count(x == 0)):
        return None
    return Explanation(
        "sqrt-at-zero",
        f"the slope of {operation} at 0 is infinite: {count_phrase(zeros, x, 'zeros')}",
        f"add an epsilon inside: {operation}(x + 1e-12)",
    )


def _power(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "self")
    x = x if x is not None else op.tensors.get("input")
    if x is None:
        return None
    if zeros := count(x == 0):
        return Explanation(
            "sqrt-at-zero" if _is_root(op) else "pow-at-zero",
            f"the slope of a power below 1 is infinite at 0: {count_phrase(zeros, x, 'zeros')}",
            "add an epsilon to the base: (x + 1e-12).pow(p)",
        )
    if negative := count(x < 0):
        return Explanation(
            "root-of-negative",
            f"the slope needs a logarithm or a root of {count_phrase(negative, x, 'negative values')}",
            "clamp(min=1e-12) the base",
        )
    return None


def _is_root(op: BadOp) -> bool:
    return op.other_args.get("exponent") in (0.5, -0.5)  # the exponent of the backward operation is one less than that of the forward


def _norm(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "result", "self")
    x = x if x is not None else _zero_argument(op)
    if x is None or not (zeros := count(x == 0)):
        return None
    return Explanation(
        "norm-at-zero",
        f"a norm or distance of 0 has no slope: {count_phrase(zeros, x, 'zeros')}",
        "add an epsilon under the root: (x.square().sum(-1) + 1e-12).sqrt(), or leave the pairs of equal points out",
    )


def _std(op: BadOp, operation: str) -> Explanation | None:
    return Explanation(
        "std-at-zero",
        f"{operation} of values that are all equal (or of one value) has no slope",
        "use (x.var() + 1e-8).sqrt(), or correction=0 where there is one value",
    )


def _acos(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "self")
    if x is None:
        return None
    at_edge = count(x.abs() == 1)
    return (
        Explanation(
            "acos-at-one",
            f"the slope of {operation} at ±1 is infinite: {count_phrase(at_edge, x, 'values')} of ±1",
            f"clamp before it: {operation}(x.clamp(-1 + 1e-6, 1 - 1e-6)), or use atan2",
        )
        if at_edge
        else None
    )


def _atan2(op: BadOp, operation: str) -> Explanation | None:
    a, b = _saved(op, "self"), _saved(op, "other")
    if a is None or b is None:
        return None
    both = (a == 0) & (b == 0)
    return (
        Explanation(
            "atan2-at-zero",
            f"atan2 at (0, 0) has no slope: {count_phrase(count(both), both, 'zero pairs')}",
            "add an epsilon to one of its arguments",
        )
        if both.any()
        else None
    )


def _division(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "other", "self")
    result = _saved(op, "result")
    if x is None and result is not None and (infinite := count(result.isinf())):
        return Explanation(
            "division-by-zero",
            f"the slope of {operation} at 0 is infinite, as was its result: {count_phrase(infinite, result, 'zeros')}",
            "add an epsilon to the divisor, or clamp(min=…) it away from 0",
        )
    if x is None or not x.numel():
        return None
    zeros = count(x == 0)
    if zeros:
        return Explanation(
            "division-by-zero",
            f"the slope of a division by {count_phrase(zeros, x, 'zeros')}",
            "add an epsilon to the divisor, or clamp(min=…) it away from 0",
        )
    smallest = float(x.detach().double().abs().min())
    return (
        Explanation(
            "division-by-zero",
            f"the slope of a division by values down to {smallest:.3g}: it has their square below the line",
            "clamp the divisor away from 0",
        )
        if smallest < 1e-15
        else None
    )


def _log(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "self")
    if x is None:
        return None
    zeros = count(x == (-1 if operation == "log1p" else 0))
    smallest = float(x.detach().double().abs().min()) if x.numel() else 1.0
    if zeros:
        return Explanation("log-of-zero", f"the slope of {operation} at {count_phrase(zeros, x, 'zeros')} is infinite", log_fix(op))
    return (
        Explanation(
            "log-of-zero", f"the slope of {operation} at values down to {smallest:.3g} is too large", "clamp(min=1e-8) before the logarithm"
        )
        if smallest < 1e-30
        else None
    )


def _svd(op: BadOp, operation: str) -> Explanation | None:
    values = _saved(op, "S", "L", "eigenvalues", "result0", "result1")
    close = ""
    if values is not None and values.dim() and values.shape[-1] > 1:
        gaps = values.detach().double().sort(-1).values.diff(dim=-1).abs()
        close = f": the closest two are {float(gaps.min()):.3g} apart"
    return Explanation(
        "repeated-singular-values",
        f"the slope of {operation} divides by differences of singular or eigenvalues, and some are equal{close}",
        "add noise or a graded diagonal to the matrix, use only the values (svdvals, eigvalsh), or compute it without gradient",
    )


def _float16_overflow(op: BadOp, operation: str) -> Explanation | None:
    if op.output.dtype is not torch.float16 or op.output.isnan().any():
        return None
    sizes = " and ".join(f"{max_abs(tensor):.3g}" for name, tensor in op.tensors.items() if tensor.dtype.is_floating_point) or "0"
    return Explanation(
        "fp16-overflow",
        f"the gradient through {operation} leaves float16, which ends at 65504: computed from values up to {sizes}",
        "lower the loss scale (GradScaler does so by itself), or use bfloat16",
    )


BACKWARD_TABLE: Mapping[str, Callable[[BadOp, str], Explanation | None]] = {
    **dict.fromkeys(("sqrt", "rsqrt"), _sqrt),
    "pow": _power,
    **dict.fromkeys(("linalg_vector_norm", "norm", "cdist", "cdist_forward", "euclidean_dist", "pairwise_distance"), _norm),
    **dict.fromkeys(("std", "var", "var_mean", "std_mean"), _std),
    **dict.fromkeys(("acos", "asin", "acosh", "atanh"), _acos),
    "atan2": _atan2,
    **dict.fromkeys(("div", "reciprocal"), _division),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), _log),
    **dict.fromkeys(("linalg_svd", "linalg_eigh", "linalg_eig", "svd"), _svd),
}
