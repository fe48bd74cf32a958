"""GradientDebugger on real models: vanishing, exploding and dead layers, how steps are counted, clipping advice, noise scale."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from sonde import GradientAnalyzer, GradientDebugger, GradientHealth, SondeError  # noqa: E402
from sonde.tools.gradients.gradient_flow_analysis import (  # noqa: E402
    GradientFrame,
    LayerGradientInfo,
    clipping_advice,
)
from sonde.tools.gradients.gradient_noise_scale import NormPair, estimate_noise_scale  # noqa: E402

pytestmark = pytest.mark.torch


class Residual(nn.Module):
    """A small ResNet, with in-place ReLUs as in the original."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """Tied embeddings, a parameter outside of any layer, and a bias (of the keys) with a gradient of rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.place = nn.Parameter(torch.zeros(10, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x) + self.place)).flatten(0, 1)


class Attention(nn.Module):
    """One head with separate layers for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 40)

    def forward(self, x):
        x = self.embedding(x)
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / 32**0.5).softmax(-1)
        return self.head(x + self.out(weights @ self.value(x))).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 16, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(16, 2)
        with torch.no_grad():
            self.rnn.weight_hh_l0.mul_(gain)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def vectors():
    x = torch.randn(64, 16)
    return x, x[:, :4].argmax(1)


def images():
    y = torch.randint(4, (16,))
    return torch.randn(16, 3, 8, 8) + y.view(-1, 1, 1, 1) * 0.5, y


def tokens():
    x = torch.randint(40, (8, 10))
    return x, x.roll(1, 1).flatten()


def sequences():
    return torch.randn(8, 50, 8), torch.randint(2, (8,))


def train(model, data, *, steps=12, debugger=None, with_optimizer=False, lr=0.01, micro_batches=1, optimizer=None):
    """Runs a training loop; returns the debugger with its hooks removed."""
    debugger = debugger or GradientDebugger()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    with debugger.register_hooks(model, optimizer if with_optimizer else None):
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                x, y = data()
                (cross_entropy(model(x), y) / micro_batches).backward()
            optimizer.step()
    return debugger


def mlp(activation, depth=10):
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(16, 16), activation())), nn.Linear(16, 4))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# ---- broken and healthy models


def test_the_first_layers_of_a_deep_sigmoid_mlp_vanish():
    report = train(mlp(nn.Sigmoid), vectors).analyze()
    vanishing = report.vanishing_layers()
    assert vanishing[:4] == ["0", "2", "4", "6"]
    assert "20" not in vanishing
    assert report.overall_health is GradientHealth.PROBLEMS_DETECTED
    assert "times that of the last layers" in report.layers["0"].why
    assert any("Xavier" in line for line in report.recommendations)


@pytest.mark.parametrize(
    ("make", "data"), [(Residual, images), (Transformer, tokens), (lambda: mlp(nn.SELU), vectors), (lambda: Recurrent(1.0), sequences)]
)
def test_a_healthy_model_has_no_layer_with_a_verdict(make, data):
    report = train(make(), data).analyze()
    assert {name: layer.why for name, layer in report.layers.items() if layer.verdict != "healthy"} == {}
    assert report.overall_health is GradientHealth.HEALTHY
    assert report.recommendations == ("Healthy: no action needed.",)
    assert report.clipping.needed is False


def test_a_recurrent_model_with_large_weights_explodes():
    report = train(Recurrent(5.0), sequences, lr=0.0).analyze()
    assert "rnn" in report.exploding_layers()
    assert report.overall_health is GradientHealth.CRITICAL
    assert report.clipping.needed


def test_a_gradient_that_is_not_finite_is_exploding_even_if_it_happened_once():
    model = nn.Linear(4, 1)
    debugger = GradientDebugger().register_hooks(model)
    for step in range(10):
        model.zero_grad()
        x = torch.ones(2, 4)
        x[0, 0] = math.inf if step == 4 else 1.0
        model(x).sum().backward()
        debugger.step()
    report = debugger.analyze()
    assert report.exploding_layers() == ["weight"]
    assert "first in step 4" in report.layers["weight"].why


def test_a_layer_behind_dead_relus_and_one_that_is_not_used_are_dead_for_different_reasons():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head, self.unused = (nn.Linear(8, 8) for _ in range(4))
            nn.init.constant_(self.second.bias, -100.0)

        def forward(self, x):
            return self.head(torch.relu(self.second(torch.relu(self.first(x)))))

    report = train(Model(), lambda: (torch.randn(16, 8), torch.randint(8, (16,)))).analyze()
    assert report.dead_layers() == ["first", "second", "unused"]
    assert "exactly zero" in report.layers["second"].why
    assert "no gradient in 12 steps" in report.layers["unused"].why
    assert report.overall_health is not GradientHealth.HEALTHY
    text = "\n".join(report.recommendations)
    assert "dead ReLUs" in text
    assert "No gradient ever reached unused" in text


def test_a_residual_branch_that_starts_at_zero_is_not_dead_once_it_has_moved():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.head(x + self.gate * self.inner(x))

    report = train(Branch(), lambda: (torch.randn(32, 8), torch.randint(4, (32,)))).analyze()
    assert report.layers["inner"].norms[0] == 0.0
    assert report.dead_layers() == []


def test_small_gradients_in_all_layers_are_not_vanishing():
    model = mlp(nn.SELU)
    debugger = GradientDebugger().register_hooks(model)
    for _ in range(5):
        model.zero_grad()
        x, y = vectors()
        (1e-4 * cross_entropy(model(x), y)).backward()
        debugger.step()
    assert debugger.analyze().vanishing_layers() == []


def test_one_noisy_step_is_no_verdict():
    debugger = GradientDebugger()
    for step in range(10):
        for layer in "abcde":
            debugger.record_gradient_flow(layer, [1e5 if layer == "a" and step == 5 else 1.0])
    assert debugger.analyze().overall_health is GradientHealth.HEALTHY


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_healthy_transformer_is_healthy_also_parameter_by_parameter(by_hand):
    """The bias of attention keys has no effect before a softmax: its gradient consists of rounding errors."""
    model, debugger = Attention(), GradientDebugger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(8):
        optimizer.zero_grad()
        x, y = tokens()
        cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters() if by_hand else ():
            debugger.record_gradient_flow(name, parameter.grad)
        if not by_hand:
            debugger.record_model(model)
        optimizer.step()
    report = debugger.analyze()
    assert {name: layer.why for name, layer in report.layers.items() if layer.verdict != "healthy"} == {}
    assert report.overall_health is GradientHealth.HEALTHY
    if by_hand:
        assert report.layers["key.bias"].norms[-1] < 1e-5 * report.layers["key.weight"].norms[-1]
        assert "key.weight gets a gradient" in report.layers["key.bias"].why


@pytest.mark.parametrize(("make", "data"), [(Residual, images), (lambda: mlp(nn.Tanh), vectors), (lambda: Recurrent(1.0), sequences)])
def test_other_healthy_models_are_healthy_parameter_by_parameter(make, data):
    model, debugger = make(), GradientDebugger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(8):
        optimizer.zero_grad()
        x, y = data()
        cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            debugger.record_gradient_flow(name, parameter.grad)
        optimizer.step()
    assert debugger.analyze().overall_health is GradientHealth.HEALTHY


def test_the_bias_of_a_layer_that_vanishes_vanishes_too():
    model, debugger = mlp(nn.Sigmoid), GradientDebugger()
    for _ in range(3):
        model.zero_grad()
        x, y = vectors()
        cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            debugger.record_gradient_flow(name, parameter.grad)
    assert {"0.weight", "0.bias"} <= set(debugger.analyze().vanishing_layers())


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("name_of", [str, lambda name: name.rpartition(".")[0]], ids=["parameters", "layers"])
@pytest.mark.parametrize("after_step", [True, False])
def test_records_by_hand_and_by_hooks_of_the_same_parameter_are_one(with_optimizer, name_of, after_step):
    model, debugger = mlp(nn.ReLU, depth=3), GradientDebugger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger.register_hooks(model, optimizer if with_optimizer else None)
    for _ in range(20):
        optimizer.zero_grad()
        x, y = vectors()
        cross_entropy(model(x), y).backward()
        if after_step:
            optimizer.step()
        for name, parameter in model.named_parameters():
            debugger.record_gradient_flow(name_of(name), parameter.grad)
        if not after_step:
            optimizer.step()
    report = debugger.analyze()
    assert report.num_steps == 20
    assert list(report.layers) == ["0", "2", "4", "6"]
    assert report.overall_health is GradientHealth.HEALTHY


def test_record_model_beside_hooks_counts_each_step_once():
    model = mlp(nn.Tanh, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = GradientDebugger().register_hooks(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        x, y = vectors()
        cross_entropy(model(x), y).backward()
        debugger.record_model(model)
        optimizer.step()
    assert debugger.analyze().num_steps == 5


@pytest.mark.parametrize("base", [1e-4, 0.1, 10.0])
def test_four_leaps_of_ten_thousand_times_are_an_explosion_at_any_scale(base):
    random, debugger = np.random.default_rng(0), GradientDebugger()
    for step in range(40):
        for layer in "abcd":
            debugger.record_gradient_flow(layer, base * random.standard_normal(10) * (1e4 if step in (8, 16, 24, 32) else 1))
    report = debugger.analyze()
    assert report.exploding_layers() == ["a", "b", "c", "d"]
    assert "in 4 of 40 steps, first in step 8" in report.layers["a"].why
    assert report.overall_health is GradientHealth.PROBLEMS_DETECTED
    assert report.clipping.needed


def test_ten_steps_with_ten_times_the_usual_norm_are_not_called_healthy_beside_the_advice_to_clip():
    debugger = GradientDebugger()
    for step in range(100):
        debugger.record_gradient_flow("a", [15.0 if step % 10 == 9 else 1.0])
    report = debugger.analyze()
    assert report.clipping.needed
    assert report.overall_health is GradientHealth.MINOR_ISSUES


def test_a_layer_of_rounding_errors_that_leaps_does_not_explode():
    debugger = GradientDebugger()
    for step in range(40):
        debugger.record_gradient_flow("main", [1.0])
        debugger.record_gradient_flow("rarely_used", [1e-4 if step % 8 == 7 else 1e-9])
    assert debugger.analyze().exploding_layers() == []


@pytest.mark.parametrize("by_hooks", [True, False])
def test_all_layers_at_norms_of_ten_thousand_explode(by_hooks):
    model, debugger = nn.Sequential(*(part for _ in range(7) for part in (nn.Linear(256, 256), nn.Tanh()))), GradientDebugger()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if by_hooks:
        debugger.register_hooks(model)
    for _ in range(5):
        model.zero_grad()
        if by_hooks:
            sum((p * torch.randn_like(p)).sum() * 1e4 / p.numel() ** 0.5 for p in model.parameters() if p.ndim == 2).backward()
        for name in () if by_hooks else names:
            debugger.record_gradient_flow(name, torch.randn(256, 256) * 1e4 / 256)
        debugger.step()
    report = debugger.analyze()
    assert report.exploding_layers() == names
    assert report.overall_health is GradientHealth.CRITICAL
    assert any("use the mean" in line for line in report.recommendations)


def test_gradients_that_start_large_and_become_usual_do_not_explode():
    """A regression on large targets: the gradient falls with the error."""
    debugger = GradientDebugger()
    for step in range(60):
        for layer in "abcd":
            debugger.record_gradient_flow(layer, [1e5 * 0.4**step + 0.1])
    assert debugger.analyze().exploding_layers() == []


def test_a_loss_scale_does_not_make_gradients_explode():
    model = Transformer()
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    with GradientDebugger().register_hooks(model, optimizer) as debugger:
        for _ in range(4):
            optimizer.zero_grad()
            x, y = tokens()
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert debugger.analyze().exploding_layers() == []
    assert not optimizer._optimizer_step_pre_hooks


def test_a_gradient_recorded_by_hand_after_the_optimizers_step_belongs_to_that_step():
    model = nn.Linear(16, 4)
    optimizer, debugger = torch.optim.SGD(model.parameters(), lr=0.1), GradientDebugger()
    debugger.register_hooks(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        x, y = vectors()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        debugger.record_gradient_flow("by hand", [float(step), 1.0])
    report = debugger.analyze()
    assert report.num_steps == 5
    assert report.layers["by hand"].steps == report.layers["weight"].steps == (0, 1, 2, 3, 4)
    assert report.layers["by hand"].norms[4] == pytest.approx(math.hypot(4, 1))
    debugger.clear()
    debugger.record_gradient_flow("by hand", [1.0])
    assert debugger.analyze().num_steps == 1


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_layer_with_12_of_16_dead_units_names_them(by_hand):
    model, debugger = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), GradientDebugger()
    with torch.no_grad():
        model[0].bias[:12] = -100.0
    if not by_hand:
        debugger.register_hooks(model)
    for _ in range(12):
        model.zero_grad()
        x, y = vectors()
        cross_entropy(model(x), y).backward()
        if by_hand:
            debugger.record_gradient_flow("0", model[0].weight.grad)
        debugger.step()
    report = debugger.analyze()
    assert report.inactive_units() == {"0": tuple(range(12))}
    assert report.layers["0"].verdict == "inactive"
    assert "12 of 16 units had no gradient in the last 12 steps: 0, 1, 2" in str(report)
    assert report.overall_health is GradientHealth.MINOR_ISSUES
    assert "dead ReLUs" in report.recommendations[0]


def test_units_that_become_active_again_are_not_inactive():
    debugger = GradientDebugger()
    for step in range(30):
        gradient = np.ones((8, 4))
        gradient[:6] *= step > 20
        debugger.record_gradient_flow("a", gradient)
    assert debugger.analyze().inactive_units() == {}


@pytest.mark.parametrize("by_hand", [True, False])
def test_rows_of_an_embedding_that_no_token_uses_are_not_inactive_units(by_hand):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(1000, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.embedding(x))

    model, debugger = Model(), GradientDebugger()
    for _ in range(15):
        model.zero_grad()
        cross_entropy(model(torch.randint(1000, (20,))), torch.randint(4, (20,))).backward()
        if by_hand:
            debugger.record_gradient_flow("embedding", model.embedding.weight.grad)
        else:
            debugger.record_model(model)
    report = debugger.analyze()
    assert report.inactive_units() == {}
    assert report.overall_health is GradientHealth.HEALTHY


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(3, 2, dtype=torch.float8_e5m2), torch.eye(3).to_sparse(), torch.eye(3, dtype=torch.complex64), [[1, 0], [0, 0]],
        np.zeros((0, 3)),
    ],
    ids=["float8", "sparse", "complex", "list", "empty"],
)  # fmt: skip
def test_gradients_whose_rows_cannot_be_read_are_recorded_all_the_same(gradient):
    debugger = GradientDebugger()
    for _ in range(4):
        debugger.record_gradient_flow("a", gradient)
    report = debugger.analyze()
    assert report.num_steps == 4
    assert report.inactive_units() == {}


def test_nan_in_a_gradient_gets_no_advice_to_clip():
    debugger = GradientDebugger()
    for step in range(20):
        for layer in "ab":
            debugger.record_gradient_flow(layer, [math.nan if step > 15 and layer == "a" else 1.0])
    report = debugger.analyze()
    assert report.exploding_layers() == ["a"]
    assert report.clipping.max_norm is None
    assert report.recommendations[0].startswith("NaN or Inf in the gradients of a: clipping does not remove them.")
    assert "clip_grad_norm_" not in "".join(report.recommendations)


def test_clear_drops_the_recorded_steps_and_leaves_the_hooks():
    model = mlp(nn.Tanh, depth=2)
    with GradientDebugger() as debugger:
        train(model, vectors, debugger=debugger)  # removes its hooks
        debugger.record_gradient_flow("extra", [1.0])
        debugger.register_hooks(model)
        debugger.clear()
        assert debugger.analyze().overall_health is None
        x, y = vectors()
        cross_entropy(model(x), y).backward()
        report = debugger.analyze()
    assert (report.num_steps, list(report.layers), report.frames[0].step) == (1, ["0", "2", "4"], 0)


# ---- statistics


def test_norms_and_means_of_a_layer_agree_with_float64():
    model = Residual()
    x, y = images()
    debugger = GradientDebugger().register_hooks(model)
    cross_entropy(model(x), y).backward()
    report = debugger.analyze()
    for name, layer in report.layers.items():
        module = model.get_submodule(name)
        exact = torch.cat([p.grad.double().flatten() for p in module.parameters(recurse=False)])
        assert layer.norms == pytest.approx((exact.norm().item(),), rel=1e-5)
        assert layer.mean_abs == pytest.approx((exact.abs().mean().item(),), rel=1e-5)
        weights = torch.cat([p.double().flatten() for p in module.parameters(recurse=False)]).norm().item()
        assert layer.per_weight == pytest.approx(exact.norm().item() / weights, rel=1e-5)
    total = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
    assert report.total_norms == pytest.approx([total], rel=1e-5)


def test_a_tied_weight_is_measured_once():
    report = train(Transformer(), tokens, steps=3).analyze()
    assert "embedding" in report.layers
    assert "head" not in report.layers


@pytest.mark.parametrize(("factor", "expected"), [(1.3, "rising"), (0.7, "falling"), (1.0, "steady")])
def test_the_trend_of_a_layer_follows_its_norms(factor, expected):
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 20)
    debugger = GradientDebugger()
    for step in range(20):
        debugger.record_gradient_flow("a", [factor**step * noise[step]])
    assert debugger.analyze().layers["a"].trend == expected


def test_a_few_steps_have_no_trend():
    debugger = GradientDebugger()
    for step in range(4):
        debugger.record_gradient_flow("a", [10.0**step])
    assert debugger.analyze().layers["a"].trend == "could not tell"


# ---- steps


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("to_none", [True, False])
def test_several_backwards_are_one_step_whichever_way_the_step_ends(optimizer, settings, to_none):
    model = nn.Linear(16, 4)
    stepper = optimizer(model.parameters(), lr=0.01, **settings)
    debugger = GradientDebugger().register_hooks(model)
    totals = []
    for _ in range(5):
        for _ in range(3):
            x, y = vectors()
            cross_entropy(model(x), y).backward()
        totals.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        stepper.step()
        stepper.zero_grad(set_to_none=to_none)
    report = debugger.analyze()
    assert report.num_steps == 5
    assert report.total_norms == pytest.approx(totals, rel=1e-5)  # of the sum, before clipping


def test_an_optimizer_counts_the_steps():
    debugger = train(Residual(), images, steps=4, with_optimizer=True, micro_batches=3)
    assert debugger.analyze().num_steps == 4
    assert "optimizer step" in debugger.analyze().steps_told_by


def test_step_ends_steps_that_neither_parameter_nor_gradient_show():
    weight = nn.Linear(3, 1)
    debugger = GradientDebugger().register_hooks(weight)
    for _ in range(4):
        for _ in range(2):
            weight(torch.ones(2, 3)).sum().backward(create_graph=False)
        debugger.step()
    assert debugger.analyze().num_steps == 4


def test_the_report_includes_the_current_step_without_ending_it():
    model = nn.Linear(16, 4)
    debugger = GradientDebugger().register_hooks(model)
    x, y = vectors()
    cross_entropy(model(x), y).backward()
    assert debugger.analyze().num_steps == 1
    cross_entropy(model(x), y).backward()
    report = debugger.analyze()
    assert report.num_steps == 1
    assert report.total_norms[0] == pytest.approx(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item(), rel=1e-5)


def test_the_history_is_bounded():
    debugger = train(nn.Linear(16, 4), vectors, steps=30, debugger=GradientDebugger(max_gradient_history=7), with_optimizer=True)
    report = debugger.analyze()
    assert report.num_steps == 7
    assert [frame.step for frame in report.frames] == list(range(23, 30))


def test_a_gradient_recorded_again_begins_a_new_step():
    debugger = GradientAnalyzer()
    for value in (1.0, 2.0, 3.0):
        debugger.record_gradient_flow("encoder", torch.full((4,), value, requires_grad=True))
        debugger.record_gradient_flow("head", np.full(4, value))
    report = debugger.analyze_gradient_flow()
    assert report.layers["encoder"].norms == (2.0, 4.0, 6.0)
    assert report.num_steps == 3


def test_a_layer_recorded_by_hand_vanishes_below_the_threshold():
    debugger = GradientDebugger()
    debugger.record_gradient_flow("tiny", [1e-10, -1e-10])
    debugger.record_gradient_flow("huge", [1e5])
    debugger.record_gradient_flow("zero", [0.0])
    report = debugger.analyze()
    assert (report.vanishing_layers(), report.exploding_layers(), report.dead_layers()) == (["tiny"], ["huge"], ["zero"])


# ---- training is not affected


@pytest.mark.parametrize(("make", "data"), [(Residual, images), (Transformer, tokens), (lambda: Recurrent(1.0), sequences)])
def test_the_training_is_bit_identical_with_and_without_hooks(make, data):
    def run(watched: bool):
        torch.manual_seed(1)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        debugger = GradientDebugger()
        if watched:
            debugger.register_hooks(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            x, y = data()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    (bare, bare_state), (watched, watched_state) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched))
    assert torch.equal(bare_state, watched_state)


def test_remove_leaves_no_hook_and_registering_twice_hooks_once():
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = GradientDebugger().register_hooks(model, optimizer).register_hooks(model)
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
    debugger.remove()
    debugger.remove()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_post_hooks


def test_a_copy_and_a_pickle_of_a_hooked_model_are_not_hooked():
    model = nn.Linear(16, 4)
    debugger = GradientDebugger().register_hooks(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x, y = vectors()
        cross_entropy(other(x), y).backward()
    assert debugger.analyze().num_steps == 0


def test_the_model_is_not_kept_alive():
    model = nn.Linear(16, 4)
    captured = weakref.ref(model.weight)
    debugger = train(model, vectors, steps=2)
    del model
    gc.collect()
    assert captured() is None
    assert debugger.analyze().num_steps == 2


def test_a_hook_that_fails_is_logged_once_and_the_training_continues(caplog, monkeypatch):
    import sonde.tools.gradient_debugger as module

    def fail(_):
        raise RuntimeError("no memory")

    model = nn.Linear(16, 4)
    monkeypatch.setattr(module, "fast_statistics", fail)
    with caplog.at_level(logging.WARNING, "sonde"):
        debugger = train(model, vectors, steps=3)
    assert sorted(record.message for record in caplog.records) == [
        "the gradient of bias is not observed any more: RuntimeError: no memory",
        "the gradient of weight is not observed any more: RuntimeError: no memory",
    ]
    assert debugger.analyze().num_steps == 0


def test_a_compiled_model_is_recorded_under_its_own_names():
    torch._dynamo.reset()
    model = mlp(nn.Tanh, depth=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    debugger = GradientDebugger().register_hooks(compiled)
    x, y = vectors()
    cross_entropy(compiled(x), y).backward()
    assert list(debugger.analyze().layers) == ["0", "2", "4"]
    assert debugger.analyze().num_steps == 1


# ---- clipping


def frames(*norms: float) -> list[GradientFrame]:
    layers = [LayerGradientInfo("a", norm, norm, norm, False, not math.isfinite(norm), 1.0) for norm in norms]
    return [GradientFrame(step, (layer,)) for step, layer in enumerate(layers)]


def test_no_clipping_is_needed_where_no_norm_stands_out():
    advice = clipping_advice(frames(*(1.0 + 0.1 * (i % 5) for i in range(40))))
    assert advice.needed is False
    assert advice.max_norm is None
    assert str(advice).startswith("no clipping needed: 40 total norms, 1 to 1.4")


def test_norms_that_fall_by_orders_of_magnitude_over_a_training_do_not_stand_out():
    assert clipping_advice(frames(*(100 * 0.9**i for i in range(100)))).needed is False


def test_spikes_are_clipped_at_the_upper_end_of_the_usual_norms():
    norms = [1.0 + 0.01 * i for i in range(50)]
    norms[10] = norms[20] = norms[40] = 300.0
    advice = clipping_advice(frames(*norms))
    assert advice.needed
    assert advice.max_norm == pytest.approx(float(np.quantile([n for n in norms if n < 100], 0.9)), rel=0.05)
    assert "3 of 50 steps" in advice.reason


@pytest.mark.parametrize("spikes", [(20,), (20, 40)])
def test_one_or_two_spikes_are_healthy_and_get_no_advice_to_clip(spikes):
    debugger = GradientDebugger()
    for step in range(50):
        debugger.record_gradient_flow("a", [1e4 if step in spikes else 1.0])
    report = debugger.analyze()
    assert report.overall_health is GradientHealth.HEALTHY
    assert (report.clipping.needed, report.clipping.max_norm) == (False, None)
    assert report.clipping.reason.startswith(f"{len(spikes)} of 50 steps had 10 times the norm of the neighboring steps")
    assert report.recommendations == ("Healthy: no action needed.",)


@pytest.mark.parametrize("clips", [False, True])
def test_with_a_loss_scale_the_norm_to_clip_at_is_that_of_unscaled_gradients(clips):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-6), torch.amp.GradScaler("cpu", init_scale=3000.0, growth_interval=15)
    norms = []
    with GradientDebugger().register_hooks(model, optimizer) as debugger:
        for step in range(40):
            optimizer.zero_grad()
            x = torch.randn(64, 8)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) * (1e4 if step in (10, 20, 30) else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3 if clips else math.inf)))
            scaler.step(optimizer)
            scaler.update()
    advice = debugger.analyze().clipping
    assert advice.max_norm == pytest.approx(float(np.quantile([norm for norm in norms if norm < 1e3], 0.9)), rel=0.05)
    assert "scaler.unscale_(optimizer)" in advice.reason


def test_clipping_is_not_taken_for_a_loss_scale():
    model, optimizer = (model := nn.Linear(8, 1)), torch.optim.SGD(model.parameters(), lr=1e-6)
    with GradientDebugger().register_hooks(model, optimizer) as debugger:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    assert "unscale_" not in debugger.analyze().clipping.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_step_is_no_reason_to_clip(bad):
    advice = clipping_advice(frames(*[2.0] * 20, bad))
    assert (advice.needed, advice.max_norm) == (False, None)
    assert "1 step with NaN or Inf not counted: clipping does not remove them" in advice.reason
    assert clipping_advice(frames(bad, bad)).max_norm is None


def test_a_few_steps_do_not_decide_whether_to_clip():
    assert str(clipping_advice(frames(1.0, 1.1))).startswith("could not tell: 2 steps recorded")
    assert clipping_advice([]).needed is None


# ---- the noise scale


def test_the_noise_scale_of_a_known_problem_is_found_by_accumulation():
    """The gradient of each sample is (1, 1, …) plus noise of standard deviation 3: S / |G|² = 9."""
    weight = nn.Parameter(torch.zeros(50))
    model = nn.Module()
    model.weight = weight
    debugger = GradientDebugger(max_gradient_history=1000, micro_batch_size=4).register_hooks(model)
    for _ in range(300):
        weight.grad = None
        for _ in range(8):
            samples = 1 + 3 * torch.randn(4, 50)
            (weight * samples.mean(0)).sum().backward()
        debugger.step()
    found = debugger.analyze().noise_scale
    assert found.unit == "samples"
    assert found.value == pytest.approx(9.0, rel=0.1)


def test_the_noise_scale_is_found_from_norms_at_two_batch_sizes():
    random = np.random.default_rng(0)
    debugger = GradientDebugger(max_gradient_history=2000)
    for batch in (2, 32):
        for _ in range(2000):
            debugger.record_norm_at(batch, float(np.linalg.norm((1 + 3 * random.standard_normal((batch, 20))).mean(0))))
    assert debugger.analyze().noise_scale.value == pytest.approx(9.0, rel=0.1)


def test_without_two_batch_sizes_the_noise_scale_is_unknown_with_a_reason():
    found = train(nn.Linear(16, 4), vectors).analyze().noise_scale
    assert found.value is None
    assert "accumulation" in str(found)
    assert "could not tell" in str(found)


def test_spikes_need_clipping_and_do_not_change_the_noise_scale():
    random = np.random.default_rng(0)
    debugger = GradientDebugger(max_gradient_history=2000)
    weight = nn.Parameter(torch.zeros(20))
    model = nn.Module()
    model.weight = weight
    debugger.register_hooks(model)
    for step in range(400):
        weight.grad = None
        for micro_batch in range(4):
            sample = torch.tensor(1 + 3 * random.standard_normal(20), dtype=torch.float32)
            (weight * sample * (60 if step % 50 == 49 and micro_batch == 3 else 1)).sum().backward()
        debugger.step()
    report = debugger.analyze()
    assert report.noise_scale.value == pytest.approx(9.0, rel=0.25)
    assert report.clipping.needed
    assert report.recommendations[0].startswith("Spikes: torch.nn.utils.clip_grad_norm_(model.parameters(), ")
    assert "no action" not in " ".join(report.recommendations)


def test_a_gradient_that_is_all_noise_has_no_noise_scale():
    assert estimate_noise_scale([NormPair(1, 8.0, 8, 0.5)] * 20, "samples").value is None
    assert estimate_noise_scale([NormPair(1, 1.0, 8, 1.5)] * 20, "samples").value is None


# ---- report


def test_nothing_recorded_is_not_called_healthy():
    report = GradientDebugger().analyze()
    assert report.overall_health is None
    assert report.summary().startswith("gradients: could not tell")
    assert "register_hooks" in report.summary()


def test_the_summary_names_verdicts_and_reasons_and_stays_short_for_500_layers():
    debugger = GradientDebugger()
    for _ in range(3):
        for i in range(500):
            debugger.record_gradient_flow(f"layers.{i}", [1e-12 if i == 3 else 1.0])
    text = debugger.analyze().summary()
    assert "layers.3 " in text
    assert "vanishing: norm 1e-12" in text
    assert "460 more layers, 0 of them not healthy" in text
    assert len(text.splitlines()) < 60


def test_the_notebook_view_escapes_names():
    debugger = GradientDebugger()
    debugger.record_gradient_flow("<img src=x onerror=alert(1)>", [math.nan])
    page = debugger.analyze()._repr_html_()
    assert "<img" not in page
    assert "NaN" in page


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    train(mlp(nn.Sigmoid), vectors).analyze().plot(tmp_path / "new" / "norms.png")
    assert (tmp_path / "new" / "norms.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: GradientDebugger(max_gradient_history=0), "max_gradient_history"),
        (lambda: GradientDebugger(vanishing_threshold=-1), "vanishing_threshold"),
        (lambda: GradientDebugger(micro_batch_size=0), "micro_batch_size"),
        (lambda: GradientDebugger().register_hooks([1, 2]), "torch.nn.Module"),
        (lambda: GradientDebugger().register_hooks(nn.ReLU()), "nothing to record"),
        (lambda: GradientDebugger().register_hooks(nn.Linear(2, 2), "opt"), r"torch.optim.Optimizer, not 'opt'"),
        (lambda: GradientDebugger().record_model([1]), "record_model takes a torch.nn.Module"),
        (lambda: GradientDebugger().record_gradient_flow(3, [1.0]), "layer name is a string"),
        (lambda: GradientDebugger().record_gradient_flow("a", "b"), "'a'"),
        (lambda: GradientDebugger().record_norm_at(0, 1.0), "batch_size"),
    ],
)
def test_a_wrong_argument_raises_a_clear_error(wrong, message):
    with pytest.raises(SondeError, match=message):
        wrong()
