"""Every explanation, on an operation that really fails so: its key, and the numbers in its sentence."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from sonde.nonfinite.explain_backward import BACKWARD_TABLE, explain_backward  # noqa: E402
from sonde.nonfinite.explain_forward import FORWARD_TABLE, BadOp, count_phrase, explain_forward  # noqa: E402
from sonde.nonfinite.find_origin_context_manager import find_origin  # noqa: E402

pytestmark = pytest.mark.torch

inf, nan = float("inf"), float("nan")


def x(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)


FORWARD = {
    "log-of-zero": (lambda: x(0, 1, 0).mul(0.5).log(), "log of 2 zeros among 3 values"),
    "log-of-zero log2": (lambda: x(0, 3).log2(), "log2 of 1 zero among 2 values"),
    "log-of-zero log1p": (lambda: x(-1, 3).log1p(), "1 of 2 values of -1"),
    "log-of-negative": (lambda: x(-2, 3).log(), "log of 1 negative value among 2 values; the lowest is -2"),
    "log-of-negative log1p": (lambda: x(-2, 3).log1p(), "1 of 2 values below -1"),
    "sqrt-of-negative": (lambda: x(-1e-7, 3).sqrt(), "the lowest is -1e-07"),
    "division-by-zero rsqrt": (lambda: x(0, 3).rsqrt(), "rsqrt (one over the root) of 1 zero among 2 values"),
    "division-by-zero": (lambda: x(1, 2) / x(0, 1), "division by 1 zero among 2 values"),
    "division-by-zero scalar": (lambda: x(1, 2) / 0, "division by 1 zero"),
    "division-by-zero both": (lambda: x(0, 0) / x(0, 1), "0/0 by 1 zero among 2 values"),
    "division-by-zero std": (lambda: x(2, 2) / x(2, 2).std(), "a standard deviation of values that are all equal"),
    "division-by-zero norm": (lambda: x(0, 0) / x(0, 0).norm(), "the norm of a zero vector"),
    "division-by-zero count": (lambda: x(3, 3).sum() / (x(1, 2) > 5).float().sum(), "a sum or count of nothing"),
    "division-by-zero reciprocal": (lambda: x(0, 2).reciprocal(), "division by 1 zero among 2 values"),
    "division-by-zero pow": (lambda: x(0, 2) ** -1.5, "1 zero among 2 values with the exponent -1.5"),
    "root-of-negative": (lambda: x(-2, 3) ** 0.5, "1 negative value among 2 values with a fractional exponent"),
    "exp-overflow": (lambda: x(1, 200).exp(), "exp of 1 of 2 values too large for float32: up to 200, the limit is 88.7"),
    "exp-overflow expm1": (lambda: x(1, 200).expm1(), "up to 200"),
    "exp-overflow sinh": (lambda: x(1, -200).sinh(), "up to 200"),
    "exp-overflow float64": (lambda: x(1, 800, dtype=torch.float64).exp(), "too large for float64: up to 800"),
    "fp16-overflow exp": (lambda: x(1, 20, dtype=torch.float16).exp(), "too large for float16: up to 20, the limit is 11.1"),
    "fp16-overflow cast": (lambda: x(1, 1e5).half(), "1 of 2 values beyond its largest number: up to 1e+05"),
    "fp16-overflow matmul": (lambda: torch.full((4, 4), 300.0).half() @ torch.full((4, 4), 300.0).half(), "inputs up to 300 and 300"),
    "fp16-overflow sum": (lambda: torch.full((4,), 3e4).half().sum(), "ends at 65504"),
    "overflow cast": (lambda: x(1, 1e300, dtype=torch.float64).float(), "cast to float32 of 1 of 2 values"),
    "overflow": (lambda: x(1e30) * x(1e30), "values up to 1e+30 leaves the range of float32"),
    "overflow cumprod": (lambda: torch.full((64,), 10.0).cumprod(0), "cumprod of values up to 10 leaves the range of float32"),
    "masked-row": (lambda: torch.full((2, 3), -inf).softmax(-1), "softmax over 2 of 2 rows where everything is masked"),
    "masked-row log_softmax": (lambda: F.log_softmax(torch.full((2, 3), -inf), -1), "log_softmax over 2 of 2 rows"),
    "out-of-domain acos": (lambda: x(1.5, 0).acos(), "1 of 2 values beyond ±1: 0 to 1.5"),
    "out-of-domain asin": (lambda: x(-1.5, 0).asin(), "-1.5 to 0"),
    "out-of-domain acosh": (lambda: x(0.5, 2).acosh(), "1 of 2 values below 1"),
    "out-of-domain atanh": (lambda: x(1, 0).atanh(), "at or beyond ±1"),
    "out-of-domain logit": (lambda: x(0.5, 0).logit(), "at or beyond 0 and 1"),
    "out-of-domain lgamma": (lambda: x(0, 3).lgamma(), "at a pole"),
    "zero-times-inf": (lambda: torch.full((2,), -inf) * x(0, 1), "0 times Inf in 1 product among 2 values"),
    "inf-minus-inf": (lambda: torch.full((2,), -inf) - torch.full((2,), -inf), "Inf - Inf is NaN"),
    "empty-mean": (lambda: x(1, 2)[x(1, 2) > 5].mean(), "mean of nothing: the input has the shape [0]"),
    "all-targets-ignored": (lambda: F.cross_entropy(torch.randn(2, 3), torch.full((2,), -100)), "all 2 targets are ignore_index (-100)"),
    "division-by-zero weights": (
        lambda: F.cross_entropy(torch.randn(2, 3), torch.tensor([0, 0]), weight=x(0, 1, 1)),
        "the classes of all 2 counted targets have weight 0",
    ),
    "ctc-too-short": (
        lambda: F.ctc_loss(torch.randn(2, 1, 5).log_softmax(-1), torch.tensor([[1, 2, 3]]), torch.tensor([2]), torch.tensor([3])),
        "for instance 2 frames for 3 labels",
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_forward_operation_is_explained_with_its_numbers(name):
    run, sentence = FORWARD[name]
    torch.manual_seed(0)
    with find_origin() as search:
        run()
    assert search.origin.key == name.split()[0]
    assert sentence in search.origin.cause
    assert search.origin.fix


@pytest.mark.filterwarnings("ignore:std")
def test_the_standard_deviation_of_one_value_is_explained():
    with find_origin() as search:
        x(3).std()
    assert search.origin.key == "std-of-one"


@pytest.mark.parametrize(
    ("produce", "fix"),
    [
        (lambda z: torch.softmax(z, -1), "log_softmax"),
        (lambda z: torch.sigmoid(z), "binary_cross_entropy_with_logits"),
        (lambda z: 1 - torch.sigmoid(-z), "binary_cross_entropy_with_logits"),
        (lambda z: torch.rand(2) * 0, "F.gumbel_softmax"),
        (lambda z: z.relu(), "clamp(min=1e-8)"),
    ],
)
def test_the_fix_for_a_logarithm_depends_on_the_operation_before_it(produce, fix):
    logits = torch.tensor([-300.0, 0.0])
    with find_origin() as search:
        produce(logits).log()
    assert fix in search.origin.fix


def test_a_kl_divergence_of_zeros_is_explained_as_kl_div():
    p = torch.tensor([[0.0, 1.0]])
    log_q = p.log()
    with find_origin() as search:
        F.kl_div(log_q, p, reduction="sum")
    assert (search.origin.operation, search.origin.key) == ("kl_div", "zero-times-inf")
    assert "log_softmax" in search.origin.fix


def test_an_epsilon_that_rounds_to_zero_in_half_precision_is_named():
    explanation = explain_forward(BadOp("native_layer_norm", x(nan).half(), {"input": x(1, 1).half()}, {"eps": 1e-9}))
    assert explanation.key == "eps-underflow"
    assert "eps of 1e-09 is 0" in explanation.cause


def test_an_infinite_reciprocal_is_a_division_by_zero_in_backward_too():
    assert explain_backward(BadOp("mul", x(inf), {"saved result": x(inf, 1)}), "reciprocal").key == "division-by-zero"


BACKWARD = {
    "sqrt": ("sqrt-at-zero", {"saved result": x(0, 1)}, "1 zero among 2 values"),
    "pow": ("pow-at-zero", {"saved self": x(0, 1)}, "1 zero among 2 values"),
    "linalg_vector_norm": ("norm-at-zero", {"saved result": x(0, 1)}, "1 zero among 2 values"),
    "std": ("std-at-zero", {"saved result": x(0, 1)}, "all equal"),
    "acos": ("acos-at-one", {"saved self": x(1, 0)}, "1 of 2 values of ±1"),
    "atan2": ("atan2-at-zero", {"saved self": x(0, 1), "saved other": x(0, 0)}, "1 zero pair among 2 values"),
    "div": ("division-by-zero", {"saved other": x(1e-30, 1)}, "down to 1e-30"),
    "log": ("log-of-zero", {"saved self": x(0, 1)}, "1 zero among 2 values"),
    "linalg_svd": ("repeated-singular-values", {"saved S": x(3, 3, 1)}, "the closest two are 0 apart"),
}


@pytest.mark.parametrize("operation", BACKWARD)
def test_a_backward_is_explained_by_the_tensors_that_the_forward_saved(operation):
    key, saved, sentence = BACKWARD[operation]
    explanation = explain_backward(BadOp("div", x(inf, nan), saved), operation)
    assert explanation.key == key
    assert sentence in explanation.cause


def test_an_operation_without_a_known_cause_is_reported_as_other():
    explanation = explain_forward(BadOp("sin", x(nan), {"input": x(1)}))
    assert (explanation.key, explanation.cause) == ("other", "sin turned finite values into NaN")
    assert explain_backward(BadOp("mul", x(nan), {"input": x(1)}), "sin").cause == "the backward of sin turned finite values into NaN"


def test_the_tables_name_only_operations_that_torch_has():
    names = [name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    aten = {name.strip("_") for name in names}
    assert set(FORWARD_TABLE) - aten == set()
    assert set(BACKWARD_TABLE) - aten - {"euclidean_dist"} == set()


def test_counts_use_singular_and_plural():
    assert count_phrase(1, torch.zeros(3), "zeros") == "1 zero among 3 values"
    assert count_phrase(1, torch.zeros(()), "zeros") == "1 zero"
    assert count_phrase(1200, torch.zeros(2000), "values") == "1,200 of 2,000 values"


def test_a_bf16_variance_that_cancels_is_a_root_of_a_negative_value():
    module = nn.Identity()
    rows = torch.full((4, 64), 100.3).bfloat16()
    with find_origin(module) as search:
        (rows.square().mean(-1) - rows.mean(-1).square() - 1).sqrt()
    assert search.origin.key == "sqrt-of-negative"
    assert "rounding" in search.origin.fix
