"""What operations are called, and what kind of thing they do to numbers. torch names its kernels, people name what they typed."""

from __future__ import annotations

from functools import cache

from torch._ops import OpOverload

# Memory that nobody has written yet: whatever is in it means nothing.
UNWRITTEN = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_", "resize_as_"}
)

# What was there before does not count: these write all of it.
OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "exponential_"}
    | {"bernoulli_", "random_", "log_normal_", "geometric_", "cauchy_"}
)

# They choose between numbers: a branch that is not taken still gets a gradient, of zero.
CHOOSES = frozenset({"where", "masked_fill", "masked_fill_", "nan_to_num", "nan_to_num_", "index", "masked_select", "masked_scatter"})

# A mask on the class that is the target: harmless until the loss picks it.
PICKS_TARGETS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})

# What they put out may be exactly 0 or 1, and is no mask for that.
CHANCES = frozenset({"softmax", "sigmoid", "log_softmax", "exp"})

_NAMES = {
    "_to_copy": "to",
    "_safe_softmax": "scaled_dot_product_attention",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_dropout": "dropout",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "rsub": "sub",
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "mv": "matmul",
    "dot": "matmul",
    "linalg_vector_norm": "norm",
    "linalg_inv_ex": "inv",
    "linalg_solve_ex": "solve",
    "linalg_cholesky_ex": "cholesky",
    "linalg_lu_factor_ex": "lu",
    "cdist_forward": "cdist",
    "var_mean": "var",
    "mkldnn_rnn_layer": "lstm",
}
_KINDS = {
    "batch_norm": "batch_norm",
    "convolution": "conv",
    "scaled_dot_product": "scaled_dot_product_attention",
    "_rnn": "rnn",
    "thnn_fused": "rnn",
}
# Functions of torch.nn.functional that are made of many steps: the step says more than their name.
_LARGE = frozenset({"multi_head_attention_forward", "_in_projection_packed", "_in_projection", "_canonical_mask", "handle_torch_function"})


@cache
def bare(func: OpOverload) -> str:
    """`aten._foreach_div_.List` is `div`, `aten._log_softmax.default` is `log_softmax`: which arithmetic it is."""
    name: str = func._schema.name.partition("::")[2]
    return name.removeprefix("_foreach").strip("_")


@cache
def known_as(func: OpOverload, called: str, module_type: str) -> str:
    """The name that a user knows: of the function called, of the layer where it is one operation, else of the arithmetic."""
    if module_type in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"):
        return module_type.lower().removesuffix("cell")
    if called and called not in _LARGE:
        return called.strip("_")
    name = bare(func)
    if name == "mm" and module_type == "Linear":
        return "linear"
    if "convolution" in name and module_type.startswith("Conv"):
        return module_type.lower()  # conv2d, convtranspose2d
    for kind, known in _KINDS.items():
        if kind in name:
            return known
    plain = _NAMES.get(name) or _NAMES.get("_" + name)
    if plain is None:
        plain = name.removesuffix("_backward").removeprefix("linalg_").removeprefix("special_")
    return plain


@cache
def overwrites(func: OpOverload) -> bool:
    name: str = func._schema.name.partition("::")[2]
    return name in OVERWRITES or any(argument.is_out for argument in func._schema.arguments)


@cache
def has_notes(func: OpOverload) -> bool:
    """Whether only its first output is a result, and the others are notes for backward, where -Inf and unwritten memory mean nothing."""
    name = bare(func)
    return "ctc_loss" in name or (name.startswith("scaled_dot_product") and "backward" not in name)


@cache
def leaves_unwritten(func: OpOverload) -> bool:
    return func._schema.name.partition("::")[2] in UNWRITTEN
