"""The tracer finds the forward operation that creates a NaN or an Inf: its name, module, line and numbers, on many kinds of models."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from sonde.nonfinite.find_origin_context_manager import find_origin  # noqa: E402
from sonde.nonfinite.operation_tracer import NonFiniteTracer  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class LogMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.body(x)
        hidden = torch.log(hidden)
        return self.head(hidden)


class Scale(nn.Module):
    """Divides by a standard deviation that may be 0."""

    def forward(self, x):
        return x / x.std(dim=(2, 3), keepdim=True)


def origin_of(run, model=None):
    with find_origin(model) as search:
        run()
    return search.origin


def test_a_logarithm_in_a_forward_is_found_with_its_line_and_its_zeros():
    model = LogMLP()
    origin = origin_of(lambda: model(torch.randn(8, 6)).sum().backward(), model)
    assert (origin.kind, origin.phase, origin.operation, origin.module) == ("inf", "forward", "log", "")
    assert origin.text == "hidden = torch.log(hidden)"
    assert origin.source.startswith("test_operation_tracer.py:")
    (summary,) = origin.inputs
    assert origin.cause == f"log of {summary.zeros} zeros among {summary.num} values"


def test_operations_that_propagate_the_value_are_not_named():
    model = LogMLP()
    with torch.no_grad():
        origin = origin_of(lambda: F.cross_entropy(model(torch.randn(8, 6)).tanh() * 2, torch.zeros(8, dtype=torch.long)), model)
    assert origin.operation == "log"


def test_a_module_inside_a_convolutional_model_is_named_by_its_path():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.ReLU(), Scale()), nn.Flatten(), nn.Linear(64, 2))
    origin = origin_of(lambda: model(torch.zeros(2, 1, 6, 6)).sum().backward(), model)
    assert (origin.operation, origin.module, origin.key) == ("div", "1.1", "division-by-zero")
    assert origin.text == "return x / x.std(dim=(2, 3), keepdim=True)"
    assert "standard deviation" in origin.cause


def test_a_recurrent_layer_with_a_nan_weight_is_named_with_that_weight():
    model = nn.ModuleDict({"rnn": nn.GRU(4, 8, batch_first=True), "out": nn.Linear(8, 1)})
    with torch.no_grad():
        model["rnn"].weight_hh_l0[3, 2] = float("nan")
    origin = origin_of(lambda: model["out"](model["rnn"](torch.randn(2, 5, 4))[0]).sum().backward(), model)
    assert (origin.phase, origin.key, origin.operation, origin.module) == ("parameter", "nan-parameter", "gru", "rnn")
    assert origin.parameters == ("rnn.weight_hh_l0",)
    assert "1 NaN among 192 values" in origin.cause


def test_a_non_finite_buffer_is_reported_as_a_buffer():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean[0] = float("inf")
    origin = origin_of(lambda: model(torch.randn(3, 4)), model)
    assert (origin.phase, origin.key) == ("buffer", "nan-buffer")
    assert "1.running_mean" in origin.cause


def test_values_that_were_non_finite_before_are_an_input():
    model = nn.Linear(4, 2)
    batch = torch.randn(8, 4)
    batch[3, 1] = float("nan")
    origin = origin_of(lambda: model(batch).sum().backward(), model)
    assert (origin.phase, origin.key, origin.module) == ("input", "nan-input", "")
    assert "1 NaN among 32 values" in origin.cause


def test_a_non_finite_batch_is_reported_at_the_line_that_calls_the_model():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4)

        def forward(self, x):
            return self.rnn(x)[0]

    model = Inner()
    batch = torch.full((2, 1, 3), float("inf"))
    with find_origin(model) as search:
        model(batch)
    assert (search.origin.operation, search.origin.module, search.origin.text) == ("Inner", "", "model(batch)")


def test_the_buffer_of_a_criterion_has_a_name_though_the_criterion_has_no_path():
    model, criterion = nn.Linear(2, 2), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, float("inf")]))
    origin = origin_of(lambda: criterion(model(torch.ones(1, 2)), torch.ones(1, 2)), model)
    assert (origin.phase, origin.module) == ("buffer", "")
    assert "BCEWithLogitsLoss.pos_weight" in origin.cause


def test_attention_over_a_fully_masked_row_is_traced_to_the_softmax():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x, mask):
            scores = self.query(x) @ self.key(x).transpose(-1, -2)
            weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
            return weights @ self.value(x)

    model = Attention()
    mask = torch.zeros(2, 5, 5, dtype=torch.bool)
    mask[1, 2] = True
    origin = origin_of(lambda: model(torch.randn(2, 5, 8), mask).sum().backward(), model)
    assert (origin.kind, origin.operation, origin.key) == ("nan", "softmax", "masked-row")
    assert origin.cause == "softmax over 1 of 10 rows where everything is masked (-Inf)"
    assert "F.softmax" in origin.text


def test_torch_attention_over_padding_alone_is_traced_to_its_softmax():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [True] * 5])
    origin = origin_of(lambda: model(x, x, x, key_padding_mask=padding)[0].sum().backward(), model)
    assert (origin.operation, origin.key) == ("softmax", "masked-row")


def test_a_mask_from_outside_is_no_origin_but_the_softmax_over_it_is():
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    mask[2] = float("-inf")
    scores = torch.randn(4, 4, requires_grad=True)
    origin = origin_of(lambda: (scores + mask).softmax(-1).square().sum().backward())
    assert (origin.operation, origin.key) == ("softmax", "masked-row")


def test_inf_minus_inf_of_a_mask_is_named():
    def logsumexp(x):
        top = x.max(-1, keepdim=True).values
        return (x - top).exp().sum(-1).log()

    scores = torch.randn(3, 4, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    origin = origin_of(lambda: logsumexp(scores.masked_fill(mask, float("-inf"))).sum().backward())
    assert (origin.operation, origin.key) == ("sub", "inf-minus-inf")
    assert origin.text == "return (x - top).exp().sum(-1).log()"


def test_a_loss_outside_of_any_module_is_found():
    model = nn.Linear(4, 3)
    origin = origin_of(lambda: F.cross_entropy(model(torch.randn(6, 4)), torch.full((6,), -100)).backward(), model)
    assert (origin.operation, origin.module, origin.key) == ("cross_entropy", "", "all-targets-ignored")
    assert "all 6 targets" in origin.cause


def test_a_softmax_by_hand_is_recognized():
    model = nn.Linear(4, 3)

    def run():
        logits = model(torch.randn(6, 4)) * 1000
        exponentials = logits.exp()
        chances = exponentials / exponentials.sum(-1, keepdim=True)
        chances.mean().backward()

    origin = origin_of(run, model)
    assert (origin.operation, origin.key) == ("exp", "unstable-softmax")
    assert "logits.exp()" in origin.text


def test_an_exponential_that_overflows_elsewhere_is_no_softmax():
    log_variance = torch.full((4,), 200.0, requires_grad=True)
    origin = origin_of(lambda: (log_variance.exp() - log_variance).sum().backward())
    assert origin.key == "exp-overflow"


def test_an_overflow_in_half_precision_is_traced_to_its_layer():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)).half()
    with torch.no_grad():
        model[1].weight.fill_(30.0)
    origin = origin_of(lambda: model(torch.full((2, 64), 60.0, dtype=torch.float16) * 500), model)
    assert (origin.operation, origin.key, origin.kind) == ("linear", "fp16-overflow", "inf")
    assert "65504" in origin.cause


def test_a_cast_by_autocast_is_named():
    x = torch.full((2, 4), 1e6, requires_grad=True)

    def run():
        with torch.autocast("cpu", dtype=torch.float16):
            (x @ torch.ones(4, 4)).float().sum().backward()

    origin = origin_of(run)
    assert (origin.operation, origin.key) == ("to", "fp16-overflow")
    assert "up to 1e+06" in origin.cause


def test_an_in_place_operation_is_explained_by_the_values_before_it():
    x = torch.rand(5, 4).sub_(0.5).relu_()
    num_zeros = int((x == 0).sum())
    origin = origin_of(x.log_)
    assert (origin.operation, origin.cause) == ("log", f"log of {num_zeros} zeros among 20 values")


def test_a_non_finite_part_of_a_tensor_is_followed_through_slices_and_views():
    def run():
        table = torch.zeros(4, 6)
        table[2, 1:3] = torch.zeros(2) / torch.zeros(2)
        return table.view(2, 12).t().reshape(-1)[5:].sum()

    origin = origin_of(run)
    assert (origin.operation, origin.key) == ("div", "division-by-zero")


def test_uninitialized_memory_is_ignored():
    def run():
        buffer = torch.empty(1000)
        buffer.fill_(float("nan"))  # what malloc may leave there
        fresh = buffer.set_(buffer.untyped_storage())
        fresh.zero_()
        return fresh.sum()

    assert origin_of(run) is None


def test_reused_memory_is_not_confused_with_its_previous_tensor():
    def run():
        for _ in range(50):
            torch.empty(64)
            torch.zeros(64).log()
        fresh = torch.from_numpy(np.full(64, np.nan, np.float32))
        return (fresh * 2).sum()

    with NonFiniteTracer() as tracer:
        result = run()
    assert tracer.origin_of(result).phase == "input"


def test_a_shared_module_is_named_by_the_path_of_the_call():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(Scale())
            self.second = nn.Sequential(self.first[0])

        def forward(self, x):
            return self.second(self.first(x + 1))

    class Second(Tied):
        def forward(self, x):
            return self.second(x)

    image = torch.zeros(1, 1, 2, 2)
    first, second = Tied(), Second()
    assert origin_of(lambda: first(image), first).module == "first.0"
    assert origin_of(lambda: second(image), second).module == "second.0"


def test_without_a_model_the_first_one_called_gives_the_names_and_others_are_named_by_class():
    class Wrong(nn.Module):
        def forward(self, x):
            return x.mean().log()

    model, criterion = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Wrong()
    origin = origin_of(lambda: criterion(model(torch.zeros(1, 2)) * 0))
    assert (origin.operation, origin.module) == ("log", "Wrong")
    model = nn.Sequential(nn.Linear(2, 2), Wrong())
    assert origin_of(lambda: model(torch.zeros(1, 2) - 9)).module == "1"


def test_a_module_outside_of_the_models_has_no_path():
    class Wrong(nn.Module):
        def forward(self, x):
            return x.mean().log()

    model, criterion = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Wrong()
    assert origin_of(lambda: criterion(model(torch.zeros(1, 2)) * 0), model).module == ""


def test_inference_mode_is_traced():
    model = LogMLP().eval()
    with torch.inference_mode():
        origin = origin_of(lambda: model(torch.randn(8, 6)), model)
    assert (origin.operation, origin.text) == ("log", "hidden = torch.log(hidden)")


def test_origin_of_explains_the_tensor_that_it_gets():
    x = torch.zeros(3)
    with NonFiniteTracer() as tracer:
        first = x.log()
        second = x / x
        loss = second.sum()
    assert tracer.origin_of(loss).operation == "div"
    assert tracer.origin_of([first]).operation == "log"
    assert tracer.origin.operation == "log"
    assert tracer.origin_of(x) is None


def test_an_update_that_makes_weights_non_finite_is_an_origin():
    model = nn.Linear(4, 2).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run():
        model(torch.zeros(3, 4, dtype=torch.float16)).sum().backward()
        optimizer.step()

    origin = origin_of(run, model)
    assert (origin.operation, origin.key, origin.parameters) == ("addcdiv", "fp16-overflow", ("weight",))
    assert origin.text == "optimizer.step()"


def test_a_compiled_model_is_run_in_eager_mode_with_a_caveat():
    model = LogMLP()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(8, 6)
    compiled(x)
    origin = origin_of(lambda: compiled(x).sum().backward(), compiled)
    assert (origin.operation, origin.module, origin.text) == ("log", "", "hidden = torch.log(hidden)")
    assert "without compiling" in origin.caveats[0]
