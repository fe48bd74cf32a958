"""Explains why a forward operation output a NaN or an Inf: from its name and its values to a cause and a fix.

`FORWARD_TABLE` maps an operation to its check. Checks that hold for any operation follow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Sums of products: Inf - Inf can result from finite inputs.
PRODUCT_OPS = ("addmm", "mm", "bmm", "baddbmm", "mv", "dot", "convolution", "mul", "addcmul")
HALF_DTYPES = (torch.float16, torch.bfloat16)
DIVISOR_FIX = "add an epsilon to the divisor, or clamp(min=…) it away from 0"


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

    @property
    def float_sizes(self) -> list[float]:
        """The largest finite absolute value of each floating-point argument."""
        return [max_abs(tensor) for tensor in self.tensors.values() if tensor.dtype.is_floating_point]


def explain_forward(op: BadOp) -> Explanation:
    """The cause and the fix of a forward operation that output a non-finite value."""
    check = FORWARD_TABLE.get(op.operation)
    return (check(op) if check else None) or explain_by_values(op, op.name)


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
    x, name = op.input, op.operation
    edge = -1 if name == "log1p" else 0
    if below := count(x < edge):
        phrase = count_phrase(below, x, "negative values" if edge == 0 else "values below -1")
        fix = f"keep what goes into {name} positive: clamp(min=1e-8), softplus, or predict the logarithm itself"
        return Explanation("log-of-negative", f"{name} of {phrase}; the lowest is {float(x.min()):.3g}", fix)
    if at := count(x == edge):
        return Explanation("log-of-zero", f"{name} of {count_phrase(at, x, 'zeros' if edge == 0 else 'values of -1')}", log_fix(op))
    return None


def _sqrt(op: BadOp) -> Explanation | None:
    x = op.input
    if negative := count(x < 0):
        cause = f"{op.operation} of {count_phrase(negative, x, 'negative values')}; the lowest is {float(x.min()):.3g}"
        fix = "keep what goes into the root above 0: clamp(min=1e-12) or softplus; a variance as E[x^2] - E[x]^2 goes below 0 by rounding"
        return Explanation("sqrt-of-negative", cause, fix)
    if op.operation == "rsqrt" and (zeros := count(x == 0)):
        cause = f"rsqrt (one over the root) of {count_phrase(zeros, x, 'zeros')}"
        return Explanation("division-by-zero", cause, "add an epsilon under the root: rsqrt(x + 1e-8)")
    return None


def _division(op: BadOp) -> Explanation | None:
    argument = {"reciprocal": "input", "addcdiv": "tensor2"}.get(op.operation, "other")
    divisor = op.input if argument == "input" else op.as_tensor(argument if argument in op.tensors else f"{argument}[0]")
    divisor = op.as_tensor(argument) if divisor is None else divisor  # a number
    if divisor is None or not (zeros := count(divisor == 0)):
        return None
    what = "0/0" if op.operation != "reciprocal" and count(op.input == 0) == op.input.numel() else "division"
    if what == "0/0" and any(name.startswith("nll_loss") for name in op.producers.get("input", ())[:1]):
        cause = "a cross entropy that is summed over no target is divided by their number, 0: all targets are ignore_index"
        return Explanation("all-targets-ignored", cause, "skip such batches, or divide by the number of counted targets, at least 1")
    cause = f"{what} by {count_phrase(zeros, divisor, 'zeros')}"
    if op.operation == "addcdiv" and divisor.dtype in HALF_DTYPES:
        cause = f"an update divided by {count_phrase(zeros, divisor, 'zeros')}: "
        cause += f"in {dtype_name(divisor.dtype)} the optimizer's eps of 1e-8 is 0"
        fix = "keep the weights in float32 and use torch.autocast for the forward, or give the optimizer eps=1e-4"
        return Explanation("fp16-overflow", cause, fix)
    producers, fix = {*op.producers.get(argument, ())[:3]}, DIVISOR_FIX
    if producers & {"std", "var"}:
        cause += ", a standard deviation of values that are all equal"
        fix = "divide by (std + 1e-8): a constant column or group has no spread"
    elif producers & {"linalg_vector_norm", "norm"}:
        cause += ", the norm of a zero vector"
        fix = "use F.normalize(x), or norm.clamp(min=1e-8): a zero vector has no direction"
    elif producers & {"sum", "count_nonzero", "bincount"}:
        cause += ", a sum or count of nothing (an empty mask or row)"
        fix = "clamp the count or sum with .clamp(min=1), or skip the empty rows"
    return Explanation("division-by-zero", cause, fix)


EXP_LIMITS = {torch.float16: 11.09, torch.bfloat16: 88.7, torch.float32: 88.72, torch.float64: 709.78}


def _exponential(op: BadOp) -> Explanation | None:
    x, dtype = op.input, op.output.dtype
    limit = EXP_LIMITS.get(dtype, 88.72) * (0.6931**-1 if op.operation == "exp2" else 1)
    size = x.abs() if op.operation in ("sinh", "cosh") else x
    over = count(size > limit - 0.1)
    if not over:
        return None
    highest, too_large = float(size.max()), count_phrase(over, x, "values")
    cause = f"{op.operation} of {too_large} too large for {dtype_name(dtype)}: up to {highest:.4g}, the limit is {limit:.1f}"
    if dtype is torch.float16 and highest < EXP_LIMITS[torch.float32]:
        return Explanation("fp16-overflow", cause, "compute the exponential in float32 (x.float()), or subtract the maximum first")
    fix = "bound the exponent (clamp(max=…), for a log-variance too), subtract the maximum, or stay in logarithms (logsumexp, softplus)"
    return Explanation("exp-overflow", cause, fix)


def _power(op: BadOp) -> Explanation | None:
    base, exponent = op.as_tensor("input"), op.as_tensor("exponent")
    if base is None or exponent is None:
        return None
    if (negative := count(base < 0)) and count(exponent != exponent.round()):
        cause = f"pow of {count_phrase(negative, base, 'negative values')} with a fractional exponent"
        return Explanation("root-of-negative", cause, "clamp(min=0) the base, or use sign(x) * abs(x).pow(p)")
    if (zeros := count(base == 0)) and float(exponent.min()) < 0:
        cause = f"pow of {count_phrase(zeros, base, 'zeros')} with the exponent {float(exponent.min()):.3g}"
        return Explanation("division-by-zero", cause, "add an epsilon to the base: a negative power of 0 is a division by 0")
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
        cause = f"{op.name} over {masked:,} of {rows.numel():,} rows where everything is masked (-Inf)"
        fix = "let every row attend to something, mask with torch.finfo(dtype).min instead of -Inf, or skip the fully padded rows"
        return Explanation("masked-row", cause, fix)
    if above := count(x == torch.inf):
        cause = f"{op.name} over {count_phrase(above, x, 'values')} of +Inf: Inf - Inf is NaN"
        return Explanation("inf-minus-inf", cause, "bound the logits: find what made them infinite")
    return None


_GAMMA_OPS = ("lgamma", "digamma", "polygamma", "mvlgamma")
_OUTSIDE_OF_DOMAIN: Mapping[str, tuple[Callable[[Tensor], Tensor], str]] = {
    **dict.fromkeys(("acos", "asin"), (lambda x: x.abs() > 1, "beyond ±1")),
    "acosh": (lambda x: x < 1, "below 1"),
    "atanh": (lambda x: x.abs() >= 1, "at or beyond ±1"),
    "logit": (lambda x: (x <= 0) | (x >= 1), "at or beyond 0 and 1"),
    "xlogy": (lambda x: x <= 0, "at or below 0"),
    **dict.fromkeys(_GAMMA_OPS, (lambda x: (x <= 0) & (x == x.round()), "at a pole (0, -1, -2 …)")),
}


def _out_of_domain(op: BadOp) -> Explanation | None:
    name = op.operation
    x = op.tensors.get("other", op.input) if name == "xlogy" else op.input
    is_outside, where = _OUTSIDE_OF_DOMAIN[name]
    outside = count(is_outside(x))
    if not outside:
        return None
    cause = f"{name} of {count_phrase(outside, x, 'values')} {where}: {float(x.min()):.6g} to {float(x.max()):.6g}"
    fix = f"clamp the input into the domain of {name}, e.g. clamp(-1 + 1e-6, 1 - 1e-6): rounding carries a cosine past 1"
    if name == "logit":
        fix = "torch.logit(p, eps=1e-6)"
    elif name in ("xlogy", *_GAMMA_OPS):
        fix = f"keep the input of {name} above 0: softplus(x) + 1e-6"
    return Explanation("out-of-domain", cause, fix)


def _empty_reduction(op: BadOp) -> Explanation | None:
    x = op.input
    per_result = x.numel() // max(op.output.numel(), 1)
    if not per_result:
        cause = f"{op.name} of nothing: the input has the shape {list(x.shape)}"
        fix = "check for an empty selection first (if mask.any()), or divide a sum by count.clamp(min=1)"
        return Explanation("empty-mean", cause, fix)
    correction = op.other_args.get("correction", 1)
    correction = 1 if correction is None else int(correction)
    if op.operation in ("std", "var", "var_mean", "std_mean") and per_result <= correction:
        cause = f"{op.name} of {per_result:,} value each: with the correction of {correction} it divides by {per_result - correction}"
        return Explanation("std-of-one", cause, "use correction=0 (unbiased=False), or make sure that there are at least two values")
    return None


def _nll_loss(op: BadOp) -> Explanation | None:
    target, ignored = op.tensors.get("target"), op.other_args.get("ignore_index", -100)
    if target is not None and not target.numel():
        return Explanation("empty-mean", f"{op.name} of an empty batch: a mean over nothing", "skip batches without samples")
    if target is not None:
        counted = target[target != ignored]
        if not counted.numel():
            cause = f"all {target.numel():,} targets are ignore_index ({ignored}): {op.name} is a mean over nothing"
            fix = "skip such batches, or use reduction='sum' and divide by the number of counted targets, at least 1"
            return Explanation("all-targets-ignored", cause, fix)
        weight = op.tensors.get("weight")
        if weight is not None and not float(weight.to("cpu")[counted.to("cpu").flatten()].abs().sum()):
            cause = f"the classes of all {counted.numel():,} counted targets have weight 0: a weighted mean divides by 0"
            return Explanation("division-by-zero", cause, "give every class that occurs a weight above 0")
    if op.input.isinf().any():
        cause = f"{op.name} of a target whose logit is -Inf: its probability is 0"
        return Explanation("masked-target", cause, "do not mask the class that is the target, or give such targets ignore_index")
    return None


def _zero_times_inf(op: BadOp) -> Explanation | None:
    a, b = op.as_tensor("input"), op.as_tensor("other")
    if a is None or b is None or not (num := count(op.output.isnan())):
        return None
    if not ((a.isinf().any() and (b == 0).any()) or (b.isinf().any() and (a == 0).any())):
        return None
    fix = "select with torch.where or masked_fill instead of multiplying by a mask: 0 times Inf is NaN"
    if "kl" in op.called:
        fix = "give kl_div log-probabilities from log_softmax, and targets without log(0); 0 times -Inf is NaN"
    return Explanation("zero-times-inf", f"0 times Inf in {count_phrase(num, op.output, 'products')}", fix)


def _ctc_lengths(op: BadOp) -> Explanation | None:
    lengths, targets = (
        op.tensors[name].tolist() if name in op.tensors else op.other_args.get(name) for name in ("input_lengths", "target_lengths")
    )
    if not isinstance(lengths, (list, tuple)) or not isinstance(targets, (list, tuple)):
        return None
    too_short = [(length, target) for length, target in zip(lengths, targets) if length <= target]
    cause = "ctc_loss of targets that fit no alignment: repeated labels need a blank between them"
    if too_short:
        example = "{} frames for {} labels".format(*too_short[0])
        cause = f"ctc_loss of {len(too_short):,} of {len(lengths):,} sequences that are too short for their targets, for instance {example}"
    return Explanation("ctc-too-short", cause, "leave such sequences out, or use zero_infinity=True")


def _cast(op: BadOp) -> Explanation | None:
    x, dtype = op.input, op.output.dtype
    if dtype is x.dtype or not dtype.is_floating_point:
        return None
    limit, kind = torch.finfo(dtype).max, dtype_name(dtype)
    over = count(x.detach().double().abs() > limit)
    if not over:
        return None
    cause = f"cast to {kind} of {count_phrase(over, x, 'values')} beyond its largest number: "
    cause += f"up to {max_abs(x):.3g}, {kind} ends at {limit:.4g}"
    key = "fp16-overflow" if dtype is torch.float16 else "overflow"
    return Explanation(key, cause, "scale the values down before the cast, or use bfloat16 or float32 here")


def _norm_eps(op: BadOp) -> Explanation | None:
    eps, x = op.other_args.get("eps"), op.input
    if eps is None or x.dtype not in HALF_DTYPES or float(torch.tensor(float(eps), dtype=x.dtype)):
        return None
    cause = f"{op.name} in {dtype_name(x.dtype)}, where its eps of {eps} is 0: equal values are divided by 0"
    return Explanation("eps-underflow", cause, "use a larger eps (1e-5), or normalize in float32")


def _singular_matrix(op: BadOp) -> Explanation:
    cause = f"{op.name} of a matrix {list(op.input.shape)} that is singular, or nearly so"
    return Explanation("singular-matrix", cause, "add a small multiple of the identity (A + 1e-6 * I), or use pinv or lstsq")


# ---- checks that hold for any operation


def _inf_inputs(op: BadOp) -> Explanation | None:
    """Inf in the inputs, NaN in the output."""
    tensors = [tensor for tensor in op.tensors.values() if tensor.dtype.is_floating_point]
    bad = sum(count(tensor.isinf()) for tensor in tensors)
    if not bad or not op.output.isnan().any() or any(tensor.isnan().any() for tensor in tensors):
        return None
    if op.operation in ("div", "reciprocal"):
        cause = f"Inf / Inf in {count_phrase(count(op.output.isnan()), op.output, 'values')}"
        return Explanation("inf-over-inf", cause, "subtract the maximum before exp, or bound both sides")
    fix = "keep the infinite entries out: use where or masked_fill on the result, or a large finite number instead of Inf"
    if op.operation in PRODUCT_OPS:
        return Explanation("zero-times-inf", f"{op.name} was given {bad:,} Inf; 0 times Inf or Inf - Inf is NaN", fix)
    return Explanation("inf-minus-inf", f"{op.name} was given {bad:,} Inf; Inf - Inf is NaN", fix)


def _float16_overflow(op: BadOp) -> Explanation | None:
    if op.output.dtype is not torch.float16:
        return None
    sizes = " and ".join(f"{size:.3g}" for size in op.float_sizes) or "its values"
    fix = "use bfloat16, or keep this operation in float32; scale the inputs down (for attention, divide before the product)"
    return Explanation("fp16-overflow", f"{op.name} in float16, which ends at 65504: inputs up to {sizes}", fix)


def _overflow(op: BadOp) -> Explanation | None:
    dtype = op.output.dtype
    if not dtype.is_floating_point or (op.output.isnan().any() and op.operation not in PRODUCT_OPS):
        return None
    limit, size = torch.finfo(dtype).max, max(op.float_sizes, default=0.0)
    if size < limit**0.25 and op.operation not in ("prod", "cumprod", "pow"):
        return None
    cause = f"{op.name} of values up to {size:.3g} leaves the range of {dtype_name(dtype)}, which ends at {limit:.3g}"
    fix = "find why the values grow: a lower learning rate, gradient clipping, normalization, or logarithms instead of products"
    return Explanation("overflow", cause, fix)


def _unknown(op: BadOp, name: str) -> Explanation:
    made = "NaN" if op.output.isnan().any() else "Inf"
    fix = "look at the ranges of its inputs, and keep them inside the domain of the operation"
    return Explanation("other", f"{name} turned finite values into {made}", fix)


_ATTENTION_OPS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
FORWARD_TABLE: Mapping[str, Callable[[BadOp], Explanation | None]] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), _log),
    **dict.fromkeys(("sqrt", "rsqrt"), _sqrt),
    **dict.fromkeys(("div", "reciprocal", "true_divide", "remainder", "fmod", "addcdiv"), _division),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), _exponential),
    "pow": _power,
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "safe_softmax"), _masked_row),
    **dict.fromkeys([f"scaled_dot_product_{kernel}" for kernel in _ATTENTION_OPS], _masked_row),
    **dict.fromkeys(_OUTSIDE_OF_DOMAIN, _out_of_domain),
    "ctc_loss": _ctc_lengths,
    **dict.fromkeys(("mean", "std", "var", "var_mean", "std_mean", "median", "nanmean"), _empty_reduction),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    "mul": _zero_times_inf,
    "to_copy": _cast,
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm", "native_batch_norm_legit"), _norm_eps),
    **dict.fromkeys(("linalg_inv_ex", "linalg_solve_ex", "linalg_slogdet", "linalg_pinv", "lu_solve"), _singular_matrix),
}
