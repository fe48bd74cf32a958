"""Explains why a backward output a NaN or an Inf: the gradient of the forward operation is infinite at values where its result is finite.

`BadOp.tensors` holds what the forward saved (`saved self`, `saved result` …), then the arguments of the backward operation.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sonde.nonfinite.explain_forward import DIVISOR_FIX, BadOp, Explanation, count, count_phrase, explain_by_values, log_fix


def explain_backward(op: BadOp, forward_name: str) -> Explanation:
    """The cause and the fix of an operation in the backward of `forward_name` that output a non-finite value."""
    check = BACKWARD_TABLE.get(forward_name, _float16_overflow)
    return check(op, forward_name) or explain_by_values(op, f"the backward of {forward_name}")


def explain_masked(explanation: Explanation, operation: str) -> Explanation:
    """The explanation if where() selected the other branch: the incoming gradient is 0 there, and 0 times Inf is NaN."""
    cause = f"{explanation.cause}; where() hides these values in the forward, but their gradient is 0 times Inf"
    fix = f"make the input of {operation} safe before it: x = torch.where(ok, x, 1.0), then where(ok, {operation}(x), other)"
    return Explanation("nan-grad-where", cause, fix)


def _saved(op: BadOp, *names: str) -> Tensor | None:
    return next((op.tensors[f"saved {name}"] for name in names if f"saved {name}" in op.tensors), None)


def _saved_or_zero_argument(op: BadOp) -> Tensor | None:
    """The saved result or input; else an argument of the backward operation that holds a zero."""
    saved = _saved(op, "result", "self")
    others = (tensor for name, tensor in op.tensors.items() if name in ("other", "input") and (tensor == 0).any())
    return saved if saved is not None else next(others, None)


def _sqrt(op: BadOp, operation: str) -> Explanation | None:
    x = _saved_or_zero_argument(op)
    if x is not None and (negative := count(x.isnan())):  # its result was NaN, and was discarded
        cause = f"{operation} of {count_phrase(negative, x, 'negative values')} has no slope"
        return Explanation("sqrt-of-negative", cause, "clamp(min=1e-12) before the root")
    if x is not None and (zeros := count(x == 0)):
        cause = f"the slope of {operation} at 0 is infinite: {count_phrase(zeros, x, 'zeros')}"
        return Explanation("sqrt-at-zero", cause, f"add an epsilon inside: {operation}(x + 1e-12)")
    return None


def _power(op: BadOp, operation: str) -> Explanation | None:
    x = op.tensors.get("saved self", op.tensors.get("input"))
    if x is not None and (zeros := count(x == 0)):
        is_root = op.other_args.get("exponent") in (0.5, -0.5)  # in backward the exponent is one less than in the forward
        cause = f"the slope of a power below 1 is infinite at 0: {count_phrase(zeros, x, 'zeros')}"
        return Explanation("sqrt-at-zero" if is_root else "pow-at-zero", cause, "add an epsilon to the base: (x + 1e-12).pow(p)")
    if x is not None and (negative := count(x < 0)):
        cause = f"the slope needs a logarithm or a root of {count_phrase(negative, x, 'negative values')}"
        return Explanation("root-of-negative", cause, "clamp(min=1e-12) the base")
    return None


def _norm(op: BadOp, operation: str) -> Explanation | None:
    x = _saved_or_zero_argument(op)
    if x is None or not (zeros := count(x == 0)):
        return None
    fix = "add an epsilon under the root: (x.square().sum(-1) + 1e-12).sqrt(), or leave the pairs of equal points out"
    return Explanation("norm-at-zero", f"a norm or distance of 0 has no slope: {count_phrase(zeros, x, 'zeros')}", fix)


def _std(op: BadOp, operation: str) -> Explanation:
    cause = f"{operation} of values that are all equal (or of one value) has no slope"
    return Explanation("std-at-zero", cause, "use (x.var() + 1e-8).sqrt(), or correction=0 where there is one value")


def _acos(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "self")
    if x is None or not (at_edge := count(x.abs() == 1)):
        return None
    cause = f"the slope of {operation} at ±1 is infinite: {count_phrase(at_edge, x, 'values')} of ±1"
    return Explanation("acos-at-one", cause, f"clamp before it: {operation}(x.clamp(-1 + 1e-6, 1 - 1e-6)), or use atan2")


def _atan2(op: BadOp, operation: str) -> Explanation | None:
    a, b = _saved(op, "self"), _saved(op, "other")
    if a is None or b is None or not (num := count((a == 0) & (b == 0))):
        return None
    cause = f"atan2 at (0, 0) has no slope: {count_phrase(num, (a == 0) & (b == 0), 'zero pairs')}"
    return Explanation("atan2-at-zero", cause, "add an epsilon to one of its arguments")


def _division(op: BadOp, operation: str) -> Explanation | None:
    x, result = _saved(op, "other", "self"), _saved(op, "result")
    if x is None and result is not None and (infinite := count(result.isinf())):
        cause = f"the slope of {operation} at 0 is infinite, as was its result: {count_phrase(infinite, result, 'zeros')}"
        return Explanation("division-by-zero", cause, DIVISOR_FIX)
    if x is None:
        return None
    if zeros := count(x == 0):
        return Explanation("division-by-zero", f"the slope of a division by {count_phrase(zeros, x, 'zeros')}", DIVISOR_FIX)
    if (smallest := _min_abs(x)) < 1e-15:
        cause = f"the slope of a division by values down to {smallest:.3g}: it has their square below the line"
        return Explanation("division-by-zero", cause, "clamp the divisor away from 0")
    return None


def _log(op: BadOp, operation: str) -> Explanation | None:
    x = _saved(op, "self")
    if x is None:
        return None
    if zeros := count(x == (-1 if operation == "log1p" else 0)):
        return Explanation("log-of-zero", f"the slope of {operation} at {count_phrase(zeros, x, 'zeros')} is infinite", log_fix(op))
    if (smallest := _min_abs(x)) < 1e-30:
        cause = f"the slope of {operation} at values down to {smallest:.3g} is too large"
        return Explanation("log-of-zero", cause, "clamp(min=1e-8) before the logarithm")
    return None


def _min_abs(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().min()) if tensor.numel() else 1.0


def _svd(op: BadOp, operation: str) -> Explanation:
    values = _saved(op, "S", "L", "eigenvalues", "result0", "result1")
    cause = f"the slope of {operation} divides by differences of singular or eigenvalues, and some are equal"
    if values is not None and values.dim() and values.shape[-1] > 1:
        gaps = values.detach().double().sort(-1).values.diff(dim=-1).abs()
        cause += f": the closest two are {float(gaps.min()):.3g} apart"
    fix = "add noise or a graded diagonal to the matrix, use only the values (svdvals, eigvalsh), or compute it without gradient"
    return Explanation("repeated-singular-values", cause, fix)


def _float16_overflow(op: BadOp, operation: str) -> Explanation | None:
    if op.output.dtype is not torch.float16 or op.output.isnan().any():
        return None
    sizes = " and ".join(f"{size:.3g}" for size in op.float_sizes) or "0"
    cause = f"the gradient through {operation} leaves float16, which ends at 65504: computed from values up to {sizes}"
    return Explanation("fp16-overflow", cause, "lower the loss scale (GradScaler does so by itself), or use bfloat16")


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
