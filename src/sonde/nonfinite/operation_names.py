"""Names and properties of ATen operators: the name that a user typed, and what the operator does to its arguments."""

from functools import cache

from sonde.statistics.private_torch_api import OpOverload, op_schema

# They return memory without writing it: its content has no meaning.
UNINITIALIZED = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_", "resize_as_")
)

# They overwrite the whole tensor and do not read its previous content.
_RANDOM = ("normal_", "uniform_", "exponential_", "bernoulli_", "random_", "log_normal_", "geometric_", "cauchy_")
OVERWRITES = frozenset(("copy_", "fill_", "zero_", "set_", *_RANDOM))

# They select among values: the branch that is not selected still gets a gradient, of zero.
SELECTION_OPS = frozenset({"where", "masked_fill", "masked_fill_", "nan_to_num", "nan_to_num_", "index", "masked_select", "masked_scatter"})

# They read the log-probability of the target class: -Inf in a masked class is harmless unless that class is the target.
TARGET_LOOKUP_OPS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})

# Their results may be exactly 0 or 1 without being a mask.
PROBABILITY_OPS = frozenset({"softmax", "sigmoid", "log_softmax", "exp"})

_DISPLAY_NAMES = {
    "to_copy": "to", "safe_softmax": "scaled_dot_product_attention", "native_layer_norm": "layer_norm", "native_group_norm": "group_norm",
    "native_dropout": "dropout", "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "rsub": "sub", "addmm": "linear",
    "mm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "mv": "matmul", "dot": "matmul", "linalg_vector_norm": "norm",
    "linalg_inv_ex": "inv", "linalg_solve_ex": "solve", "linalg_cholesky_ex": "cholesky", "linalg_lu_factor_ex": "lu",
    "cdist_forward": "cdist", "var_mean": "var", "mkldnn_rnn_layer": "lstm",
}  # fmt: skip
_DISPLAY_NAMES_BY_SUBSTRING = {
    "batch_norm": "batch_norm", "convolution": "conv", "scaled_dot_product": "scaled_dot_product_attention", "_rnn": "rnn",
    "thnn_fused": "rnn",
}  # fmt: skip
# Functions of torch.nn.functional that consist of many operations: the operation is more precise than their name.
_COMPOSITE_FUNCTIONS = frozenset(
    {"multi_head_attention_forward", "_in_projection_packed", "_in_projection", "_canonical_mask", "handle_torch_function"}
)


@cache
def base_name(func: OpOverload) -> str:
    """The operation without variant and overload: `aten._foreach_div_.List` is `div`, `aten._log_softmax.default` is `log_softmax`."""
    name: str = op_schema(func).name.partition("::")[2]
    return name.removeprefix("_foreach").strip("_")


@cache
def display_name(func: OpOverload, called: str, module_type: str) -> str:
    """The name that a user knows: of the function of torch.nn.functional (`called`), the layer if it is one operation, or the operation."""
    if module_type in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"):
        return module_type.lower().removesuffix("cell")
    if called and called not in _COMPOSITE_FUNCTIONS:
        return called.strip("_")
    name = base_name(func)
    if name == "mm" and module_type == "Linear":
        return "linear"
    if "convolution" in name and module_type.startswith("Conv"):
        return module_type.lower()  # conv2d, convtranspose2d
    known = next((known for substring, known in _DISPLAY_NAMES_BY_SUBSTRING.items() if substring in name), _DISPLAY_NAMES.get(name))
    return known or name.removesuffix("_backward").removeprefix("linalg_").removeprefix("special_")


@cache
def overwrites_args(func: OpOverload) -> bool:
    """Whether the previous content of the arguments that it writes has no influence on the result."""
    name: str = op_schema(func).name.partition("::")[2]
    return name in OVERWRITES or any(argument.is_out for argument in op_schema(func).arguments)


@cache
def has_auxiliary_outputs(func: OpOverload) -> bool:
    """Whether only the first output is a result. The others are saved for backward; -Inf and unwritten memory are normal in them."""
    name = base_name(func)
    return "ctc_loss" in name or (name.startswith("scaled_dot_product") and "backward" not in name)


@cache
def is_uninitialized(func: OpOverload) -> bool:
    """Whether the output is memory that nothing has written yet."""
    return op_schema(func).name.partition("::")[2] in UNINITIALIZED
