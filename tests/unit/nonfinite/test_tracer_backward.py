"""A NaN or an Inf that backward creates is reported with the forward operation that it belongs to."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sonde.nonfinite.find_origin_context_manager import find_origin  # noqa: E402
from sonde.nonfinite.operation_tracer import NonFiniteTracer  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def origin_of(run, model=None):
    with find_origin(model) as search:
        run()
    return search.origin


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)

    def forward(self, a, b):
        apart = self.embed(a) - self.embed(b)
        return apart.square().sum(-1).sqrt()


def test_a_sqrt_at_zero_is_found_although_the_loss_is_finite():
    model = Distance()
    a = torch.tensor([0, 1, 2])
    origin = origin_of(lambda: model(a, torch.tensor([3, 1, 4])).mean().backward(), model)
    assert (origin.phase, origin.operation, origin.module, origin.key) == ("backward", "sqrt", "", "sqrt-at-zero")
    assert origin.text == "return apart.square().sum(-1).sqrt()"
    assert "1 zero among 3 values" in origin.cause


def test_a_branch_that_where_hides_is_recognized():
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4)

    def run():
        y = model(x)
        torch.where(y > 0, torch.sqrt(y), torch.zeros(())).sum().backward()

    origin = origin_of(run, model)
    assert (origin.phase, origin.operation, origin.key) == ("backward", "sqrt", "nan-grad-where")
    assert "torch.where(ok, x, 1.0)" in origin.fix


def test_a_power_that_where_hides_is_recognized():
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4)

    def run():
        y = model(x)
        torch.where(y > 0, (y * (y > 0)) ** 0.5, torch.zeros(())).sum().backward()

    origin = origin_of(run, model)
    assert (origin.operation, origin.key) == ("pow", "nan-grad-where")


def test_a_sqrt_in_the_branch_that_where_selects_is_not_hidden():
    x = torch.zeros(4, requires_grad=True)
    origin = origin_of(lambda: torch.where(x >= 0, x.sqrt(), -x).sum().backward())
    assert (origin.operation, origin.key) == ("sqrt", "sqrt-at-zero")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_keeps_the_line_and_the_module(use_reentrant):
    class Root(nn.Module):
        def forward(self, x):
            return (x * (x > 0)).sqrt()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.root, self.out = nn.Linear(4, 4), Root(), nn.Linear(4, 1)

        def part(self, x):
            return self.root(self.inner(x))

        def forward(self, x):
            return self.out(checkpoint(self.part, x, use_reentrant=use_reentrant))

    model = Net()
    x = torch.randn(8, 4, requires_grad=True)
    origin = origin_of(lambda: model(x).sum().backward(), model)
    assert (origin.phase, origin.operation, origin.module) == ("backward", "sqrt", "root")
    assert origin.text == "return (x * (x > 0)).sqrt()"


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (x - x)


def test_a_custom_autograd_function_is_named_with_the_line_in_its_backward():
    class Layer(nn.Module):
        def forward(self, x):
            return Wrong.apply(x)

    model = nn.Sequential(nn.Linear(3, 3), Layer())
    origin = origin_of(lambda: model(torch.randn(2, 3)).sum().backward(), model)
    assert (origin.phase, origin.operation, origin.module) == ("backward", "Wrong", "1")
    assert (origin.text, origin.cause) == ("return grad / (x - x)", "division by 6 zeros among 6 values")


def test_a_gradient_hook_is_named_with_its_line():
    def unit_length(grad):
        return grad / grad.norm()

    model = nn.Linear(3, 3)

    def run():
        hidden = model(torch.randn(2, 3))
        hidden.register_hook(unit_length)
        (hidden * 0).sum().backward()

    origin = origin_of(run, model)
    assert (origin.phase, origin.text, origin.key) == ("backward", "return grad / grad.norm()", "division-by-zero")


def test_an_inf_that_only_breaks_the_backward_is_traced_to_the_operation_that_created_it():
    gain = nn.Parameter(torch.zeros(3))
    x = torch.ones(3, requires_grad=True)
    with NonFiniteTracer({"": nn.ParameterDict({"gain": gain})}) as tracer:
        loss = (x / (x * (1.0 / gain))).sum()
        bad = [gradient for gradient in torch.autograd.grad(loss, (x, gain)) if not gradient.isfinite().all()]
    assert loss.isfinite()
    origin = tracer.origin_of(bad)
    assert (origin.phase, origin.operation, origin.key, origin.parameters) == ("forward", "reciprocal", "division-by-zero", ("gain",))


def test_the_parameters_of_the_forward_operation_are_named():
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self):
            return torch.linalg.svd(self.weight)[0].abs().sum()

    model = Turn()
    origin = origin_of(lambda: model().backward(), model)
    assert (origin.operation, origin.parameters) == ("svd", ("weight",))


def test_gradients_from_autograd_grad_are_traced():
    x = torch.zeros(3, requires_grad=True)
    with NonFiniteTracer() as tracer:
        loss = x.sqrt().sum()
        (gradient,) = torch.autograd.grad(loss, x)
    assert tracer.origin.operation == "sqrt"
    assert tracer.origin_of(gradient).phase == "backward"
    assert tracer.origin_of(loss) is None


@pytest.mark.parametrize(
    ("operation", "key", "compute"),
    [
        ("acos", "acos-at-one", lambda x: (x + 1).acos()),
        ("asin", "acos-at-one", lambda x: (x - 1).asin()),
        ("pow", "sqrt-at-zero", lambda x: x**0.5),
        ("pow", "pow-at-zero", lambda x: x**0.3),
        ("log", "log-of-zero", lambda x: torch.where(x > 0, x.log(), x)),
        ("svd", "repeated-singular-values", lambda x: torch.linalg.svd(torch.eye(3) + x[:, None])[0]),
        ("eigh", "repeated-singular-values", lambda x: torch.linalg.eigh(torch.eye(3) + torch.diag(x))[1].abs()),
    ],
)
def test_an_infinite_slope_is_reported_with_its_operation(operation, key, compute):
    x = torch.zeros(3, requires_grad=True)
    origin = origin_of(lambda: compute(x).sum().backward())
    assert (origin.phase, origin.operation) == ("backward", operation)
    assert origin.key in (key, "nan-grad-where")


def test_a_gradient_that_overflows_half_precision_is_reported():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    with torch.no_grad():
        model[1].weight.fill_(200.0)
    origin = origin_of(lambda: (model(torch.full((2, 4), 0.01).half()).float() * 1000).sum().backward(), model)
    assert (origin.phase, origin.key) == ("backward", "fp16-overflow")


def test_a_non_finite_gradient_of_an_earlier_step_is_recognized():
    model = nn.Linear(2, 1)
    model.weight.grad = torch.full((1, 2), float("nan"))
    origin = origin_of(lambda: model(torch.ones(1, 2)).sum().backward(), model)
    assert ".grad held 2 NaN" in origin.cause
    assert "zero_grad" in origin.fix


def test_a_sqrt_at_zero_inside_a_recurrent_loop_is_found():
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.GRUCell(2, 3)

        def forward(self, xs):
            state = torch.zeros(1, 3)
            for x in xs:
                state = self.step(x, state)
                spread = ((state * 0).square().sum()).sqrt()
            return state.sum() + spread

    model = Cell()
    origin = origin_of(lambda: model(torch.randn(4, 1, 2)).backward(), model)
    assert (origin.operation, origin.phase) == ("sqrt", "backward")
    assert origin.text == "spread = ((state * 0).square().sum()).sqrt()"


def test_cross_entropy_of_a_masked_target_is_not_hidden_by_its_mask():
    logits = torch.randn(4, 3, requires_grad=True)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2, 1] = True
    origin = origin_of(lambda: F.cross_entropy(logits.masked_fill(mask, float("-inf")), torch.tensor([0, 0, 1, 0])).backward())
    assert (origin.kind, origin.phase, origin.operation, origin.key) == ("inf", "forward", "cross_entropy", "masked-target")
