"""Why a backward made a bad number: the slope of the forward operation is infinite there, though its value was not.

A case holds what the forward had saved (`saved self`, `saved result` …), then what the backward computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sonde.nonfinite.bad_op import Case, Told, among, count, largest, remedy_of_log


def explain_backward(case: Case, operation: str) -> Told | None:
    """The cause by the forward operation; None where the numbers alone must tell."""
    entry = TABLE.get(operation)
    return entry(case, operation) if entry else _half(case, operation)


def hidden(told: Told, operation: str) -> Told:
    """The same where a where() had chosen the other branch: its gradient is 0, but 0 times Inf is NaN."""
    return Told(
        "nan-grad-where",
        f"{told.cause}; where() hides these values in the forward, but their gradient is 0 times Inf",
        f"make the input of {operation} safe before it: x = torch.where(ok, x, 1.0), then where(ok, {operation}(x), other)",
    )


def _saved(case: Case, *names: str) -> Tensor | None:
    return next((case.given[f"saved {name}"] for name in names if f"saved {name}" in case.given), None)


def _zero_in_computing(case: Case) -> Tensor | None:
    """Where nothing was saved under a known name: a zero that the backward divided by."""
    return next((tensor for name, tensor in case.given.items() if name in ("other", "input") and (tensor == 0).any()), None)


def _root(case: Case, operation: str) -> Told | None:
    x = _saved(case, "result", "self")
    x = x if x is not None else _zero_in_computing(case)
    if x is not None and (negative := count(x.isnan())):  # its result was NaN, and somebody threw that away
        return Told(
            "sqrt-of-negative", f"{operation} of {among(negative, x, 'negative values')} has no slope", "clamp(min=1e-12) before the root"
        )
    if x is None or not (zeros := count(x == 0)):
        return None
    return Told(
        "sqrt-at-zero",
        f"the slope of {operation} at 0 is infinite: {among(zeros, x, 'zeros')}",
        f"add an epsilon inside: {operation}(x + 1e-12)",
    )


def _power(case: Case, operation: str) -> Told | None:
    x = _saved(case, "self")
    x = x if x is not None else case.given.get("input")
    if x is None:
        return None
    if zeros := count(x == 0):
        return Told(
            "sqrt-at-zero" if _is_root(case) else "pow-at-zero",
            f"the slope of a power below 1 is infinite at 0: {among(zeros, x, 'zeros')}",
            "add an epsilon to the base: (x + 1e-12).pow(p)",
        )
    if negative := count(x < 0):
        return Told(
            "root-of-negative",
            f"the slope needs a logarithm or a root of {among(negative, x, 'negative values')}",
            "clamp(min=1e-12) the base",
        )
    return None


def _is_root(case: Case) -> bool:
    return case.numbers.get("exponent") in (0.5, -0.5)  # in backward the exponent is already one less


def _norm(case: Case, operation: str) -> Told | None:
    x = _saved(case, "result", "self")
    x = x if x is not None else _zero_in_computing(case)
    if x is None or not (zeros := count(x == 0)):
        return None
    return Told(
        "norm-at-zero",
        f"a norm or distance of 0 has no slope: {among(zeros, x, 'zeros')}",
        "add an epsilon under the root: (x.square().sum(-1) + 1e-12).sqrt(), or leave the pairs of equal points out",
    )


def _spread(case: Case, operation: str) -> Told | None:
    return Told(
        "std-at-zero",
        f"{operation} of values that are all equal (or of one value) has no slope",
        "use (x.var() + 1e-8).sqrt(), or correction=0 where there is one value",
    )


def _arc(case: Case, operation: str) -> Told | None:
    x = _saved(case, "self")
    if x is None:
        return None
    edge = count(x.abs() == 1)
    return (
        Told(
            "acos-at-one",
            f"the slope of {operation} at ±1 is infinite: {among(edge, x, 'values')} of ±1",
            f"clamp before it: {operation}(x.clamp(-1 + 1e-6, 1 - 1e-6)), or use atan2",
        )
        if edge
        else None
    )


def _atan2(case: Case, operation: str) -> Told | None:
    a, b = _saved(case, "self"), _saved(case, "other")
    if a is None or b is None:
        return None
    both = (a == 0) & (b == 0)
    return (
        Told(
            "atan2-at-zero",
            f"atan2 at (0, 0) has no slope: {among(count(both), both, 'pairs of zeros')}",
            "add an epsilon to one of its arguments",
        )
        if both.any()
        else None
    )


def _division(case: Case, operation: str) -> Told | None:
    x = _saved(case, "other", "self")
    result = _saved(case, "result")
    if x is None and result is not None and (infinite := count(result.isinf())):
        return Told(
            "division-by-zero",
            f"the slope of {operation} at 0 is infinite, as was its result: {among(infinite, result, 'zeros')}",
            "add an epsilon to the divisor, or clamp(min=…) it away from 0",
        )
    if x is None or not x.numel():
        return None
    zeros = count(x == 0)
    if zeros:
        return Told(
            "division-by-zero",
            f"the slope of a division by {among(zeros, x, 'zeros')}",
            "add an epsilon to the divisor, or clamp(min=…) it away from 0",
        )
    smallest = float(x.detach().double().abs().min())
    return (
        Told(
            "division-by-zero",
            f"the slope of a division by values down to {smallest:.3g}: it has their square below the line",
            "clamp the divisor away from 0",
        )
        if smallest < 1e-15
        else None
    )


def _log(case: Case, operation: str) -> Told | None:
    x = _saved(case, "self")
    if x is None:
        return None
    zeros = count(x == (-1 if operation == "log1p" else 0))
    smallest = float(x.detach().double().abs().min()) if x.numel() else 1.0
    if zeros:
        return Told("log-of-zero", f"the slope of {operation} at {among(zeros, x, 'zeros')} is infinite", remedy_of_log(case))
    return (
        Told(
            "log-of-zero", f"the slope of {operation} at values down to {smallest:.3g} is too large", "clamp(min=1e-8) before the logarithm"
        )
        if smallest < 1e-30
        else None
    )


def _spectrum(case: Case, operation: str) -> Told | None:
    values = _saved(case, "S", "L", "eigenvalues", "result0", "result1")
    close = ""
    if values is not None and values.dim() and values.shape[-1] > 1:
        gaps = values.detach().double().sort(-1).values.diff(dim=-1).abs()
        close = f": the closest two are {float(gaps.min()):.3g} apart"
    return Told(
        "repeated-singular-values",
        f"the slope of {operation} divides by differences of singular or eigenvalues, and some are equal{close}",
        "add noise or a graded diagonal to the matrix, use only the values (svdvals, eigvalsh), or compute it without gradient",
    )


def _half(case: Case, operation: str) -> Told | None:
    if case.output.dtype is not torch.float16 or case.output.isnan().any():
        return None
    sizes = " and ".join(f"{largest(tensor):.3g}" for name, tensor in case.given.items() if tensor.dtype.is_floating_point) or "0"
    return Told(
        "fp16-overflow",
        f"the gradient through {operation} leaves float16, which ends at 65504: computed from values up to {sizes}",
        "lower the loss scale (GradScaler does so by itself), or use bfloat16",
    )


TABLE: Mapping[str, Callable[[Case, str], Told | None]] = {
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    "pow": _power,
    **dict.fromkeys(("linalg_vector_norm", "norm", "cdist", "cdist_forward", "euclidean_dist", "pairwise_distance"), _norm),
    **dict.fromkeys(("std", "var", "var_mean", "std_mean"), _spread),
    **dict.fromkeys(("acos", "asin", "acosh", "atanh"), _arc),
    "atan2": _atan2,
    **dict.fromkeys(("div", "reciprocal"), _division),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), _log),
    **dict.fromkeys(("linalg_svd", "linalg_eigh", "linalg_eig", "svd"), _spectrum),
}
