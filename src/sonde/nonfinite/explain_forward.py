"""Why an operation made a bad number: from its name and its numbers to a plain sentence and a remedy. One table, most telling first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sonde.nonfinite.bad_op import HALF, PRODUCTS, Case, Told, among, count, largest, remedy_of_log, short
from sonde.nonfinite.explain_backward import explain_backward


def explain(case: Case, backward_of: str = "") -> Told:
    """The cause. For backward, `backward_of` is the forward operation and `case` holds what it had saved, then what it computed with."""
    if backward_of:
        told = explain_backward(case, backward_of)
    else:
        told = next((told for entry in TABLE.get(case.operation, ()) if (told := entry(case)) is not None), None)
    return told or _of_infinities(case) or _of_precision(case) or _of_size(case) or _unknown(case, backward_of)


def _log(case: Case) -> Told | None:
    x = case.input
    edge = -1 if case.operation == "log1p" else 0
    at, below = count(x == edge), count(x < edge)
    if not at and not below:
        return None
    name = case.operation
    if below:
        said = among(below, x, "negative values" if edge == 0 else "values below -1")
        return Told(
            "log-of-negative",
            f"{name} of {said}; the lowest is {float(x.min()):.3g}",
            f"keep what goes into {name} positive: clamp(min=1e-8), softplus, or predict the logarithm itself",
        )
    return Told("log-of-zero", f"{name} of {among(at, x, 'zeros' if edge == 0 else 'values of -1')}", remedy_of_log(case))


def _root(case: Case) -> Told | None:
    x = case.input
    negative, zeros = count(x < 0), count(x == 0)
    if negative:
        return Told(
            "sqrt-of-negative",
            f"{case.operation} of {among(negative, x, 'negative values')}; the lowest is {float(x.min()):.3g}",
            "clamp(min=0) before the root: a variance computed as E[x²] - E[x]² goes below 0 by rounding",
        )
    if zeros and case.operation == "rsqrt":
        return Told(
            "division-by-zero", f"rsqrt (one over the root) of {among(zeros, x, 'zeros')}", "add an epsilon under the root: rsqrt(x + 1e-8)"
        )
    return None


def _divisor(case: Case) -> tuple[Tensor | None, str]:
    if case.operation == "reciprocal":
        return case.input, "input"
    if case.operation == "addcdiv":
        return case.other("tensor2") if "tensor2" in case.given else case.other("tensor2[0]"), "tensor2"
    return case.other("other"), "other"


def _division(case: Case) -> Told | None:
    divisor, argument = _divisor(case)
    if divisor is None or not (zeros := count(divisor == 0)):
        return None
    above = "0/0" if case.operation != "reciprocal" and count(case.input == 0) == case.input.numel() else "division"
    if above == "0/0" and any(name.startswith("nll_loss") for name in case.made_by.get("input", ())[:1]):
        return Told(
            "all-targets-ignored",
            "a cross entropy that is summed over no target is divided by their number, 0: all targets are ignore_index",
            "skip such batches, or divide by the number of counted targets, at least 1",
        )
    behind = case.made_by.get(argument, ())[:3]
    fix = "add an epsilon to the divisor, or clamp(min=…) it away from 0"
    why = ""
    if any(name in behind for name in ("std", "var")):
        fix, why = "divide by (std + 1e-8): a constant column or group has no spread", ", a standard deviation of values that are all equal"
    elif any(name in behind for name in ("linalg_vector_norm", "norm")):
        fix, why = "use F.normalize(x), or norm.clamp(min=1e-8): a zero vector has no direction", ", the norm of a zero vector"
    elif any(name in behind for name in ("sum", "count_nonzero", "bincount")):
        fix, why = (
            "clamp the count or sum with .clamp(min=1), or skip the empty rows",
            ", a sum or count of nothing (an empty mask or row)",
        )
    if case.operation == "addcdiv" and divisor.dtype in HALF:
        return Told(
            "fp16-overflow",
            f"an update divided by {among(zeros, divisor, 'zeros')}: in {short(divisor.dtype)} the optimizer's eps of 1e-8 is 0",
            "keep the weights in float32 and use torch.autocast for the forward, or give the optimizer eps=1e-4",
        )
    return Told("division-by-zero", f"{above} by {among(zeros, divisor, 'zeros')}{why}", fix)


EXP_LIMITS = {torch.float16: 11.09, torch.bfloat16: 88.7, torch.float32: 88.72, torch.float64: 709.78}


def _exponential(case: Case) -> Told | None:
    x = case.input
    limit = EXP_LIMITS.get(case.output.dtype, 88.72) * (0.6931**-1 if case.operation == "exp2" else 1)
    size = x.abs() if case.operation in ("sinh", "cosh") else x
    over = count(size > limit - 0.1)
    if not over:
        return None
    kind = short(case.output.dtype)
    cause = f"{case.operation} of {among(over, x, 'values')} too large for {kind}: up to {float(size.max()):.4g}, the limit is {limit:.1f}"
    if case.output.dtype is torch.float16 and float(size.max()) < EXP_LIMITS[torch.float32]:
        return Told("fp16-overflow", cause, "compute the exponential in float32 (x.float()), or subtract the maximum first")
    return Told(
        "exp-overflow",
        cause,
        "bound the exponent (clamp(max=…), for a log-variance too), subtract the maximum, or stay in logarithms (logsumexp, softplus)",
    )


def _power(case: Case) -> Told | None:
    base, exponent = case.other("input"), case.other("exponent")
    if base is None or exponent is None:
        return None
    fractional = count(exponent != exponent.round()) > 0
    negative, zeros = count(base < 0), count(base == 0)
    if negative and fractional:
        return Told(
            "root-of-negative",
            f"pow of {among(negative, base, 'negative values')} with a fractional exponent",
            "clamp(min=0) the base, or use sign(x) * abs(x).pow(p)",
        )
    if zeros and float(exponent.min()) < 0:
        return Told(
            "division-by-zero",
            f"pow of {among(zeros, base, 'zeros')} with the exponent {float(exponent.min()):.3g}",
            "add an epsilon to the base: a negative power of 0 is a division by 0",
        )
    return None


def _row(case: Case) -> Told | None:
    """A softmax whose row holds nothing but -Inf."""
    x, dim = case.input, case.numbers.get("dim", -1)
    masks = [tensor for name, tensor in case.given.items() if "mask" in name]
    if masks:
        x, dim = masks[0], -1
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if not x.dtype.is_floating_point or not x.dim() or not len(dims) or x.shape[dims[0]] == 0:
        return None
    rows = (x == -torch.inf).all(dims[0])
    if masked := count(rows):
        return Told(
            "masked-row",
            f"{case.name} over {masked:,} of {rows.numel():,} rows where everything is masked (-Inf)",
            "let every row attend to something, mask with torch.finfo(dtype).min instead of -Inf, or skip the fully padded rows",
        )
    if above := count(x == torch.inf):
        return Told(
            "inf-minus-inf",
            f"{case.name} over {among(above, x, 'values')} of +Inf: Inf - Inf is NaN",
            "bound the logits: find what made them infinite",
        )
    return None


def _domain(case: Case) -> Told | None:
    x, name = case.input, case.operation
    if name == "acosh":
        outside, said = count(x < 1), "below 1"
    elif name == "atanh":
        outside, said = count(x.abs() >= 1), "at or beyond ±1"
    elif name == "logit":
        outside, said = count((x <= 0) | (x >= 1)), "at or beyond 0 and 1"
    elif name in ("lgamma", "digamma", "polygamma", "mvlgamma"):
        outside, said = count((x <= 0) & (x == x.round())), "at a pole (0, -1, -2 …)"
    elif name == "xlogy":
        outside, said = count(case.given.get("other", x) <= 0), "at or below 0"
    else:
        outside, said = count(x.abs() > 1), "beyond ±1"
    if not outside:
        return None
    cause = f"{name} of {among(outside, x, 'values')} {said}: {float(x.min()):.6g} to {float(x.max()):.6g}"
    if name in ("logit", "lgamma", "digamma", "polygamma", "mvlgamma", "xlogy"):
        return Told(
            "out-of-domain",
            cause,
            "torch.logit(p, eps=1e-6)" if name == "logit" else f"keep the input of {name} above 0: softplus(x) + 1e-6",
        )
    return Told(
        "out-of-domain",
        cause,
        f"clamp the input into the domain of {name}, e.g. clamp(-1 + 1e-6, 1 - 1e-6): rounding carries a cosine past 1",
    )


def _reduction(case: Case) -> Told | None:
    x = case.input
    spread = case.operation in ("std", "var", "var_mean", "std_mean")
    per_result = x.numel() // max(case.output.numel(), 1)
    if per_result == 0 or not x.numel():
        return Told(
            "empty-mean",
            f"{case.name} of nothing: the input has the shape {list(x.shape)}",
            "check for an empty selection first (if mask.any()), or divide a sum by count.clamp(min=1)",
        )
    correction = case.numbers.get("correction", 1)
    correction = 1 if correction is None else int(correction)
    if spread and per_result <= correction:
        return Told(
            "std-of-one",
            f"{case.name} of {per_result:,} value each: with the correction of {correction} it divides by {per_result - correction}",
            "use correction=0 (unbiased=False), or make sure that there are at least two values",
        )
    return None


def _ignored(case: Case) -> Told | None:
    target, ignored = case.given.get("target"), case.numbers.get("ignore_index", -100)
    if target is None:
        return None
    if not target.numel():
        return Told("empty-mean", f"{case.name} of an empty batch: a mean over nothing", "skip batches without samples")
    counted = target[target != ignored]
    if not counted.numel():
        return Told(
            "all-targets-ignored",
            f"all {target.numel():,} targets are ignore_index ({ignored}): {case.name} is a mean over nothing",
            "skip such batches, or use reduction='sum' and divide by the number of counted targets, at least 1",
        )
    weight = case.given.get("weight")
    if weight is not None and not float(weight.to("cpu")[counted.to("cpu").flatten()].abs().sum()):
        return Told(
            "division-by-zero",
            f"the classes of all {counted.numel():,} counted targets have weight 0: a weighted mean divides by 0",
            "give every class that occurs a weight above 0",
        )
    return None


def _masked_target(case: Case) -> Told | None:
    if case.input.isinf().any():
        return Told(
            "masked-target",
            f"{case.name} of a target whose logit is -Inf: its probability is 0",
            "do not mask the class that is the target, or give such targets ignore_index",
        )
    return None


def _zero_times_infinity(case: Case) -> Told | None:
    tensors = [tensor for name in ("input", "other") if (tensor := case.other(name)) is not None]
    if len(tensors) < 2 or not case.output.isnan().any():
        return None
    a, b = tensors
    if not ((a.isinf().any() and (b == 0).any()) or (b.isinf().any() and (a == 0).any())):
        return None
    num = count(case.output.isnan())
    fix = "select with torch.where or masked_fill instead of multiplying by a mask: 0 times Inf is NaN"
    if case.called == "kl_div" or "kl" in case.called:
        fix = "give kl_div log-probabilities from log_softmax, and targets without log(0); 0 times -Inf is NaN"
    return Told("zero-times-inf", f"0 times Inf in {among(num, case.output, 'products')}", fix)


def _alignment(case: Case) -> Told | None:
    lengths, targets = case.numbers.get("input_lengths"), case.numbers.get("target_lengths")
    lengths = case.given["input_lengths"].tolist() if "input_lengths" in case.given else lengths
    targets = case.given["target_lengths"].tolist() if "target_lengths" in case.given else targets
    if not isinstance(lengths, (list, tuple)) or not isinstance(targets, (list, tuple)):
        return None
    brief = [i for i, (length, target) in enumerate(zip(lengths, targets)) if length <= target]
    cause = "ctc_loss of targets that fit no alignment: repeated labels need a blank between them"
    if brief:
        example = f"{lengths[brief[0]]} frames for {targets[brief[0]]} labels"
        cause = f"ctc_loss of {len(brief):,} of {len(lengths):,} sequences that are too short for their targets, for instance {example}"
    return Told("ctc-too-short", cause, "leave such sequences out, or use zero_infinity=True")


def _cast(case: Case) -> Told | None:
    x, dtype = case.input, case.output.dtype
    if dtype is x.dtype or not dtype.is_floating_point:
        return None
    limit = torch.finfo(dtype).max
    over = count(x.detach().double().abs() > limit)
    if not over:
        return None
    kind = short(dtype)
    return Told(
        "fp16-overflow" if dtype is torch.float16 else "overflow",
        f"cast to {kind} of {among(over, x, 'values')} beyond its largest number: up to {largest(x):.3g}, {kind} ends at {limit:.4g}",
        "scale the values down before the cast, or use bfloat16 or float32 here",
    )


def _normalised(case: Case) -> Told | None:
    eps, x = case.numbers.get("eps"), case.input
    if eps is not None and x.dtype in HALF and not float(torch.tensor(float(eps), dtype=x.dtype)):
        return Told(
            "eps-underflow",
            f"{case.name} in {short(x.dtype)}, where its eps of {eps} is 0: equal values are divided by 0",
            "use a larger eps (1e-5), or normalise in float32",
        )
    return None


def _matrix(case: Case) -> Told | None:
    x = case.input
    return Told(
        "singular-matrix",
        f"{case.name} of a matrix {list(x.shape)} that is singular, or nearly so",
        "add a small multiple of the identity (A + 1e-6 * I), or use pinv or lstsq",
    )


def _of_infinities(case: Case) -> Told | None:
    """Inf went in, and NaN came out."""
    tensors = [tensor for tensor in case.given.values() if tensor.dtype.is_floating_point]
    bad = sum(count(tensor.isinf()) for tensor in tensors)
    if not bad or not case.output.isnan().any() or any(tensor.isnan().any() for tensor in tensors):
        return None
    if case.operation in ("div", "reciprocal"):
        return Told(
            "inf-over-inf",
            f"Inf / Inf in {among(count(case.output.isnan()), case.output, 'values')}",
            "subtract the maximum before exp, or bound both sides",
        )
    product = case.operation in PRODUCTS
    return Told(
        "inf-minus-inf" if not product else "zero-times-inf",
        f"{case.name} was given {bad:,} Inf; {'0 times Inf or ' if product else ''}Inf - Inf is NaN",
        "keep the infinite entries out: use where or masked_fill on the result, or a large finite number instead of Inf",
    )


def _of_precision(case: Case) -> Told | None:
    if case.output.dtype is not torch.float16:
        return None
    sizes = " and ".join(f"{largest(tensor):.3g}" for tensor in case.given.values() if tensor.dtype.is_floating_point) or "its values"
    return Told(
        "fp16-overflow",
        f"{case.name} in float16, which ends at 65504: inputs up to {sizes}",
        "use bfloat16, or keep this operation in float32; scale the inputs down (for attention, divide before the product)",
    )


def _of_size(case: Case) -> Told | None:
    if not case.output.dtype.is_floating_point or (case.output.isnan().any() and case.operation not in PRODUCTS):
        return None
    limit = torch.finfo(case.output.dtype).max
    size = max((largest(tensor) for tensor in case.given.values() if tensor.dtype.is_floating_point), default=0.0)
    if size < limit**0.25 and case.operation not in ("prod", "cumprod", "pow"):
        return None
    kind = short(case.output.dtype)
    return Told(
        "overflow",
        f"{case.name} of values up to {size:.3g} leaves the range of {kind}, which ends at {limit:.3g}",
        "find why the values grow: a lower learning rate, gradient clipping, normalisation, or logarithms instead of products",
    )


def _unknown(case: Case, backward_of: str) -> Told:
    made = "NaN" if case.output.isnan().any() else "Inf"
    name = f"the backward of {backward_of}" if backward_of else case.name
    return Told(
        "other",
        f"{name} turned finite values into {made}",
        "look at the ranges of its inputs, and keep them inside the domain of the operation",
    )


Entry = Callable[[Case], Told | None]
TABLE: Mapping[str, tuple[Entry, ...]] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), (_log,)),
    **dict.fromkeys(("sqrt", "rsqrt"), (_root,)),
    **dict.fromkeys(("div", "reciprocal", "true_divide", "remainder", "fmod", "addcdiv"), (_division,)),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), (_exponential,)),
    "pow": (_power,),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "safe_softmax"), (_row,)),
    **dict.fromkeys(
        (
            "scaled_dot_product_flash_attention_for_cpu",
            "scaled_dot_product_flash_attention",
            "scaled_dot_product_efficient_attention",
            "scaled_dot_product_cudnn_attention",
        ),
        (_row,),
    ),
    **dict.fromkeys(("acos", "asin", "acosh", "atanh", "xlogy", "logit", "lgamma", "digamma", "polygamma", "mvlgamma"), (_domain,)),
    "ctc_loss": (_alignment,),
    **dict.fromkeys(("mean", "std", "var", "var_mean", "std_mean", "median", "nanmean"), (_reduction,)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (_ignored, _masked_target)),
    "mul": (_zero_times_infinity,),
    "to_copy": (_cast,),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm", "native_batch_norm_legit"), (_normalised,)),
    **dict.fromkeys(("linalg_inv_ex", "linalg_solve_ex", "linalg_slogdet", "linalg_pinv", "lu_solve"), (_matrix,)),
}
