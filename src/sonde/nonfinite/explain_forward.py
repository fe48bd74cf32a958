"""Explains why a forward operation output a NaN or an Inf: from its name and its values to a cause and a fix.

`FORWARD_TABLE` maps an operation to its checks, most specific first. Checks that hold for any operation follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Sums of products: Inf - Inf can result from finite inputs.
PRODUCT_OPS = ("addmm", "mm", "bmm", "baddbmm", "mv", "dot", "convolution", "mul", "addcmul")
HALF_DTYPES = (torch.float16, torch.bfloat16)


class Explanation(NamedTuple):
    """The name of a defect, its cause and its fix."""

    key: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class BadOp:
    """An operation that output a non-finite value, with its arguments as they were before it ran."""

    operation: str  # its base name: "log", "div", "softmax"
    output: Tensor
    tensors: Mapping[str, Tensor]  # by the name of the argument; the first is "input". In backward: saved tensors first
    other_args: Mapping[str, Any] = field(default_factory=dict)
    producers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # for each tensor the operations that produced it, nearest first
    called: str = ""  # the function that the user called, if it has another name

    @property
    def name(self) -> str:
        return self.called or self.operation

    @property
    def input(self) -> Tensor:
        return next(iter(self.tensors.values()), self.output)

    def as_tensor(self, name: str) -> Tensor | None:
        """An argument as a tensor, also if it is a plain number."""
        if name in self.tensors:
            return self.tensors[name]
        number = self.other_args.get(name)
        return torch.tensor(float(number), dtype=torch.float64) if isinstance(number, (int, float)) else None

    def has_producer(self, *operations: str) -> bool:
        """Whether one of these operations produced an argument."""
        return any(name in operations for names in self.producers.values() for name in names)


def explain_forward(op: BadOp) -> Explanation:
    """The cause and the fix of a forward operation that output a non-finite value."""
    found = next((found for check in FORWARD_TABLE.get(op.operation, ()) if (found := check(op)) is not None), None)
    return found or explain_by_values(op, op.name)


def explain_by_values(op: BadOp, name: str) -> Explanation:
    """The explanation from the values alone, for an operation whose table entry does not apply. `name`: what the sentence calls it."""
    return _inf_inputs(op) or _float16_overflow(op) or _overflow(op) or _unknown(op, name)


# ---- helpers, also for explain_backward


def count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))


def count_phrase(num: int, tensor: Tensor, what: str) -> str:
    """`12 zeros among 320 values`."""
    if what.startswith("values"):
        return f"{num:,} of {tensor.numel():,} {what}"
    thing = what if num != 1 else what.removesuffix("s")
    return f"{num:,} {thing}" if tensor.numel() == num == 1 else f"{num:,} {thing} among {tensor.numel():,} values"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def max_abs(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    return float(tensor.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if tensor.numel() else 0.0


def log_fix(op: BadOp) -> str:
    """The fix for a logarithm of 0, which depends on the operation that produced the 0."""
    if op.has_producer("softmax"):
        return "use F.log_softmax(logits) (or cross_entropy on the logits) instead of the log of a softmax, which rounds to 0"
    if op.has_producer("sigmoid"):
        return "use F.logsigmoid or F.binary_cross_entropy_with_logits on the logits: a saturated sigmoid is exactly 0 or 1"
    if op.has_producer("uniform", "rand", "rand_like"):
        return "uniform samples can be exactly 0 (and -log(u) exactly 0): clamp them away from 0 and 1, or use F.gumbel_softmax"
    return "add a small constant or clamp(min=1e-8) before the logarithm"


# ---- checks of single operations


def _log(op: BadOp) -> Explanation | None:
    x = op.input
    edge = -1 if op.operation == "log1p" else 0
    at, below = count(x == edge), count(x < edge)
    if not at and not below:
        return None
    name = op.operation
    if below:
        phrase = count_phrase(below, x, "negative values" if edge == 0 else "values below -1")
        return Explanation(
            "log-of-negative",
            f"{name} of {phrase}; the lowest is {float(x.min()):.3g}",
            f"keep what goes into {name} positive: clamp(min=1e-8), softplus, or predict the logarithm itself",
        )
    return Explanation("log-of-zero", f"{name} of {count_phrase(at, x, 'zeros' if edge == 0 else 'values of -1')}", log_fix(op))


def _sqrt(op: BadOp) -> Explanation | None:
    x = op.input
    negative, zeros = count(x < 0), count(x == 0)
    if negative:
        return Explanation(
            "sqrt-of-negative",
            f"{op.operation} of {count_phrase(negative, x, 'negative values')}; the lowest is {float(x.min()):.3g}",
            "clamp(min=0) before the root: a variance computed as E[x²] - E[x]² goes below 0 by rounding",
        )
    if zeros and op.operation == "rsqrt":
        return Explanation(
            "division-by-zero",
            f"rsqrt (one over the root) of {count_phrase(zeros, x, 'zeros')}",
            "add an epsilon under the root: rsqrt(x + 1e-8)",
        )
    return None


def _divisor(op: BadOp) -> tuple[Tensor | None, str]:
    if op.operation == "reciprocal":
        return op.input, "input"
    if op.operation == "addcdiv":
        return op.as_tensor("tensor2") if "tensor2" in op.tensors else op.as_tensor("tensor2[0]"), "tensor2"
    return op.as_tensor("other"), "other"


def _division(op: BadOp) -> Explanation | None:
    divisor, argument = _divisor(op)
    if divisor is None or not (zeros := count(divisor == 0)):
        return None
    what = "0/0" if op.operation != "reciprocal" and count(op.input == 0) == op.input.numel() else "division"
    if what == "0/0" and any(name.startswith("nll_loss") for name in op.producers.get("input", ())[:1]):
        return Explanation(
            "all-targets-ignored",
            "a cross entropy that is summed over no target is divided by their number, 0: all targets are ignore_index",
            "skip such batches, or divide by the number of counted targets, at least 1",
        )
    producers = op.producers.get(argument, ())[:3]
    fix = "add an epsilon to the divisor, or clamp(min=…) it away from 0"
    why = ""
    if any(name in producers for name in ("std", "var")):
        fix, why = "divide by (std + 1e-8): a constant column or group has no spread", ", a standard deviation of values that are all equal"
    elif any(name in producers for name in ("linalg_vector_norm", "norm")):
        fix, why = "use F.normalize(x), or norm.clamp(min=1e-8): a zero vector has no direction", ", the norm of a zero vector"
    elif any(name in producers for name in ("sum", "count_nonzero", "bincount")):
        fix, why = (
            "clamp the count or sum with .clamp(min=1), or skip the empty rows",
            ", a sum or count of nothing (an empty mask or row)",
        )
    if op.operation == "addcdiv" and divisor.dtype in HALF_DTYPES:
        return Explanation(
            "fp16-overflow",
            f"an update divided by {count_phrase(zeros, divisor, 'zeros')}: "
            f"in {dtype_name(divisor.dtype)} the optimizer's eps of 1e-8 is 0",
            "keep the weights in float32 and use torch.autocast for the forward, or give the optimizer eps=1e-4",
        )
    return Explanation("division-by-zero", f"{what} by {count_phrase(zeros, divisor, 'zeros')}{why}", fix)


EXP_LIMITS = {torch.float16: 11.09, torch.bfloat16: 88.7, torch.float32: 88.72, torch.float64: 709.78}


def _exponential(op: BadOp) -> Explanation | None:
    x = op.input
    limit = EXP_LIMITS.get(op.output.dtype, 88.72) * (0.6931**-1 if op.operation == "exp2" else 1)
    size = x.abs() if op.operation in ("sinh", "cosh") else x
    over = count(size > limit - 0.1)
    if not over:
        return None
    kind = dtype_name(op.output.dtype)
    too_large = count_phrase(over, x, "values")
    cause = f"{op.operation} of {too_large} too large for {kind}: up to {float(size.max()):.4g}, the limit is {limit:.1f}"
    if op.output.dtype is torch.float16 and float(size.max()) < EXP_LIMITS[torch.float32]:
        return Explanation("fp16-overflow", cause, "compute the exponential in float32 (x.float()), or subtract the maximum first")
    return Explanation(
        "exp-overflow",
        cause,
        "bound the exponent (clamp(max=…), for a log-variance too), subtract the maximum, or stay in logarithms (logsumexp, softplus)",
    )


def _power(op: BadOp) -> Explanation | None:
    base, exponent = op.as_tensor("input"), op.as_tensor("exponent")
    if base is None or exponent is None:
        return None
    is_fractional = count(exponent != exponent.round()) > 0
    negative, zeros = count(base < 0), count(base == 0)
    if negative and is_fractional:
        return Explanation(
            "root-of-negative",
            f"pow of {count_phrase(negative, base, 'negative values')} with a fractional exponent",
            "clamp(min=0) the base, or use sign(x) * abs(x).pow(p)",
        )
    if zeros and float(exponent.min()) < 0:
        return Explanation(
            "division-by-zero",
            f"pow of {count_phrase(zeros, base, 'zeros')} with the exponent {float(exponent.min()):.3g}",
            "add an epsilon to the base: a negative power of 0 is a division by 0",
        )
    return None


def _masked_row(op: BadOp) -> Explanation | None:
    """A softmax over a row that is -Inf everywhere."""
    x, dim = op.input, op.other_args.get("dim", -1)
    masks = [tensor for name, tensor in op.tensors.items() if "mask" in name]
    if masks:
        x, dim = masks[0], -1
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if not x.dtype.is_floating_point or not x.dim() or not len(dims) or x.shape[dims[0]] == 0:
        return None
    rows = (x == -torch.inf).all(dims[0])
    if masked := count(rows):
        return Explanation(
            "masked-row",
            f"{op.name} over {masked:,} of {rows.numel():,} rows where everything is masked (-Inf)",
            "let every row attend to something, mask with torch.finfo(dtype).min instead of -Inf, or skip the fully padded rows",
        )
    if above := count(x == torch.inf):
        return Explanation(
            "inf-minus-inf",
            f"{op.name} over {count_phrase(above, x, 'values')} of +Inf: Inf - Inf is NaN",
            "bound the logits: find what made them infinite",
        )
    return None


def _out_of_domain(op: BadOp) -> Explanation | None:
    x, name = op.input, op.operation
    if name == "acosh":
        outside, where = count(x < 1), "below 1"
    elif name == "atanh":
        outside, where = count(x.abs() >= 1), "at or beyond ±1"
    elif name == "logit":
        outside, where = count((x <= 0) | (x >= 1)), "at or beyond 0 and 1"
    elif name in ("lgamma", "digamma", "polygamma", "mvlgamma"):
        outside, where = count((x <= 0) & (x == x.round())), "at a pole (0, -1, -2 …)"
    elif name == "xlogy":
        outside, where = count(op.tensors.get("other", x) <= 0), "at or below 0"
    else:
        outside, where = count(x.abs() > 1), "beyond ±1"
    if not outside:
        return None
    cause = f"{name} of {count_phrase(outside, x, 'values')} {where}: {float(x.min()):.6g} to {float(x.max()):.6g}"
    if name in ("logit", "lgamma", "digamma", "polygamma", "mvlgamma", "xlogy"):
        return Explanation(
            "out-of-domain",
            cause,
            "torch.logit(p, eps=1e-6)" if name == "logit" else f"keep the input of {name} above 0: softplus(x) + 1e-6",
        )
    return Explanation(
        "out-of-domain",
        cause,
        f"clamp the input into the domain of {name}, e.g. clamp(-1 + 1e-6, 1 - 1e-6): rounding carries a cosine past 1",
    )


def _empty_reduction(op: BadOp) -> Explanation | None:
    x = op.input
    is_spread = op.operation in ("std", "var", "var_mean", "std_mean")
    per_result = x.numel() // max(op.output.numel(), 1)
    if per_result == 0 or not x.numel():
        return Explanation(
            "empty-mean",
            f"{op.name} of nothing: the input has the shape {list(x.shape)}",
            "check for an empty selection first (if mask.any()), or divide a sum by count.clamp(min=1)",
        )
    correction = op.other_args.get("correction", 1)
    correction = 1 if correction is None else int(correction)
    if is_spread and per_result <= correction:
        return Explanation(
            "std-of-one",
            f"{op.name} of {per_result:,} value each: with the correction of {correction} it divides by {per_result - correction}",
            "use correction=0 (unbiased=False), or make sure that there are at least two values",
        )
    return None


def _ignored_targets(op: BadOp) -> Explanation | None:
    target, ignored = op.tensors.get("target"), op.other_args.get("ignore_index", -100)
    if target is None:
        return None
    if not target.numel():
        return Explanation("empty-mean", f"{op.name} of an empty batch: a mean over nothing", "skip batches without samples")
    counted = target[target != ignored]
    if not counted.numel():
        return Explanation(
            "all-targets-ignored",
            f"all {target.numel():,} targets are ignore_index ({ignored}): {op.name} is a mean over nothing",
            "skip such batches, or use reduction='sum' and divide by the number of counted targets, at least 1",
        )
    weight = op.tensors.get("weight")
    if weight is not None and not float(weight.to("cpu")[counted.to("cpu").flatten()].abs().sum()):
        return Explanation(
            "division-by-zero",
            f"the classes of all {counted.numel():,} counted targets have weight 0: a weighted mean divides by 0",
            "give every class that occurs a weight above 0",
        )
    return None


def _masked_target(op: BadOp) -> Explanation | None:
    if op.input.isinf().any():
        return Explanation(
            "masked-target",
            f"{op.name} of a target whose logit is -Inf: its probability is 0",
            "do not mask the class that is the target, or give such targets ignore_index",
        )
    return None


def _zero_times_inf(op: BadOp) -> Explanation | None:
    tensors = [tensor for name in ("input", "other") if (tensor := op.as_tensor(name)) is not None]
    if len(tensors) < 2 or not op.output.isnan().any():
        return None
    a, b = tensors
    if not ((a.isinf().any() and (b == 0).any()) or (b.isinf().any() and (a == 0).any())):
        return None
    num = count(op.output.isnan())
    fix = "select with torch.where or masked_fill instead of multiplying by a mask: 0 times Inf is NaN"
    if op.called == "kl_div" or "kl" in op.called:
        fix = "give kl_div log-probabilities from log_softmax, and targets without log(0); 0 times -Inf is NaN"
    return Explanation("zero-times-inf", f"0 times Inf in {count_phrase(num, op.output, 'products')}", fix)


def _ctc_lengths(op: BadOp) -> Explanation | None:
    lengths, targets = op.other_args.get("input_lengths"), op.other_args.get("target_lengths")
    lengths = op.tensors["input_lengths"].tolist() if "input_lengths" in op.tensors else lengths
    targets = op.tensors["target_lengths"].tolist() if "target_lengths" in op.tensors else targets
    if not isinstance(lengths, (list, tuple)) or not isinstance(targets, (list, tuple)):
        return None
    too_short = [i for i, (length, target) in enumerate(zip(lengths, targets)) if length <= target]
    cause = "ctc_loss of targets that fit no alignment: repeated labels need a blank between them"
    if too_short:
        example = f"{lengths[too_short[0]]} frames for {targets[too_short[0]]} labels"
        cause = f"ctc_loss of {len(too_short):,} of {len(lengths):,} sequences that are too short for their targets, for instance {example}"
    return Explanation("ctc-too-short", cause, "leave such sequences out, or use zero_infinity=True")


def _cast(op: BadOp) -> Explanation | None:
    x, dtype = op.input, op.output.dtype
    if dtype is x.dtype or not dtype.is_floating_point:
        return None
    limit = torch.finfo(dtype).max
    over = count(x.detach().double().abs() > limit)
    if not over:
        return None
    kind = dtype_name(dtype)
    return Explanation(
        "fp16-overflow" if dtype is torch.float16 else "overflow",
        f"cast to {kind} of {count_phrase(over, x, 'values')} beyond its largest number: "
        f"up to {max_abs(x):.3g}, {kind} ends at {limit:.4g}",
        "scale the values down before the cast, or use bfloat16 or float32 here",
    )


def _norm_eps(op: BadOp) -> Explanation | None:
    eps, x = op.other_args.get("eps"), op.input
    if eps is not None and x.dtype in HALF_DTYPES and not float(torch.tensor(float(eps), dtype=x.dtype)):
        return Explanation(
            "eps-underflow",
            f"{op.name} in {dtype_name(x.dtype)}, where its eps of {eps} is 0: equal values are divided by 0",
            "use a larger eps (1e-5), or normalize in float32",
        )
    return None


def _singular_matrix(op: BadOp) -> Explanation | None:
    x = op.input
    return Explanation(
        "singular-matrix",
        f"{op.name} of a matrix {list(x.shape)} that is singular, or nearly so",
        "add a small multiple of the identity (A + 1e-6 * I), or use pinv or lstsq",
    )


# ---- checks that hold for any operation


def _inf_inputs(op: BadOp) -> Explanation | None:
    """Inf in the inputs, NaN in the output."""
    tensors = [tensor for tensor in op.tensors.values() if tensor.dtype.is_floating_point]
    bad = sum(count(tensor.isinf()) for tensor in tensors)
    if not bad or not op.output.isnan().any() or any(tensor.isnan().any() for tensor in tensors):
        return None
    if op.operation in ("div", "reciprocal"):
        return Explanation(
            "inf-over-inf",
            f"Inf / Inf in {count_phrase(count(op.output.isnan()), op.output, 'values')}",
            "subtract the maximum before exp, or bound both sides",
        )
    is_product = op.operation in PRODUCT_OPS
    return Explanation(
        "inf-minus-inf" if not is_product else "zero-times-inf",
        f"{op.name} was given {bad:,} Inf; {'0 times Inf or ' if is_product else ''}Inf - Inf is NaN",
        "keep the infinite entries out: use where or masked_fill on the result, or a large finite number instead of Inf",
    )


def _float16_overflow(op: BadOp) -> Explanation | None:
    if op.output.dtype is not torch.float16:
        return None
    sizes = " and ".join(f"{max_abs(tensor):.3g}" for tensor in op.tensors.values() if tensor.dtype.is_floating_point) or "its values"
    return Explanation(
        "fp16-overflow",
        f"{op.name} in float16, which ends at 65504: inputs up to {sizes}",
        "use bfloat16, or keep this operation in float32; scale the inputs down (for attention, divide before the product)",
    )


def _overflow(op: BadOp) -> Explanation | None:
    if not op.output.dtype.is_floating_point or (op.output.isnan().any() and op.operation not in PRODUCT_OPS):
        return None
    limit = torch.finfo(op.output.dtype).max
    size = max((max_abs(tensor) for tensor in op.tensors.values() if tensor.dtype.is_floating_point), default=0.0)
    if size < limit**0.25 and op.operation not in ("prod", "cumprod", "pow"):
        return None
    kind = dtype_name(op.output.dtype)
    return Explanation(
        "overflow",
        f"{op.name} of values up to {size:.3g} leaves the range of {kind}, which ends at {limit:.3g}",
        "find why the values grow: a lower learning rate, gradient clipping, normalization, or logarithms instead of products",
    )


def _unknown(op: BadOp, name: str) -> Explanation:
    made = "NaN" if op.output.isnan().any() else "Inf"
    return Explanation(
        "other",
        f"{name} turned finite values into {made}",
        "look at the ranges of its inputs, and keep them inside the domain of the operation",
    )


Check = Callable[[BadOp], Explanation | None]
FORWARD_TABLE: Mapping[str, tuple[Check, ...]] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), (_log,)),
    **dict.fromkeys(("sqrt", "rsqrt"), (_sqrt,)),
    **dict.fromkeys(("div", "reciprocal", "true_divide", "remainder", "fmod", "addcdiv"), (_division,)),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), (_exponential,)),
    "pow": (_power,),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "safe_softmax"), (_masked_row,)),
    **dict.fromkeys(
        (
            "scaled_dot_product_flash_attention_for_cpu",
            "scaled_dot_product_flash_attention",
            "scaled_dot_product_efficient_attention",
            "scaled_dot_product_cudnn_attention",
        ),
        (_masked_row,),
    ),
    **dict.fromkeys(("acos", "asin", "acosh", "atanh", "xlogy", "logit", "lgamma", "digamma", "polygamma", "mvlgamma"), (_out_of_domain,)),
    "ctc_loss": (_ctc_lengths,),
    **dict.fromkeys(("mean", "std", "var", "var_mean", "std_mean", "median", "nanmean"), (_empty_reduction,)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (_ignored_targets, _masked_target)),
    "mul": (_zero_times_inf,),
    "to_copy": (_cast,),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm", "native_batch_norm_legit"), (_norm_eps,)),
    **dict.fromkeys(("linalg_inv_ex", "linalg_solve_ex", "linalg_slogdet", "linalg_pinv", "lu_solve"), (_singular_matrix,)),
}
