"""WeightAnalyzer: recognized recipes, fit to the activation, spectrum compared with float64, dead units by weights and activations."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional, init  # noqa: E402

from sonde import SondeError, WeightAnalyzer  # noqa: E402
from sonde.tools.weights.weight_initialization import recognize_initialization  # noqa: E402
from sonde.tools.weights.weight_spectrum import WeightSpectrum, compute_spectrum  # noqa: E402

pytestmark = pytest.mark.torch
SIZES = [(16, 16), (64, 32), (10, 100), (300, 300), (64, 3, 3, 3), (1024, 512)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def analyze(model, data=None):
    return WeightAnalyzer().analyze_model(model, data)


# ---- initialization

RECIPES = {
    "Xavier uniform": init.xavier_uniform_,
    "Xavier normal": init.xavier_normal_,
    "Kaiming uniform": lambda w: init.kaiming_uniform_(w, nonlinearity="relu"),
    "Kaiming normal": lambda w: init.kaiming_normal_(w, nonlinearity="relu"),
    "torch default": lambda w: init.kaiming_uniform_(w, a=math.sqrt(5)),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_recognized_at_every_size(name, size):
    weight = torch.empty(size)
    for _ in range(5):
        RECIPES[name](weight)
        assert name in recognize_initialization(weight).recipes


@pytest.mark.parametrize("size", [(64, 32), (300, 300), (1024, 512)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_not_confused_with_one_of_another_scale_or_shape(name, size):
    weight = torch.empty(size)
    RECIPES[name](weight)
    fan_in, fan_out = size[1], size[0]
    scales = {
        "Xavier": 2 / (fan_in + fan_out),
        "Kaiming": 2 / fan_in,
        "torch": 1 / (3 * fan_in),
    }
    for found in recognize_initialization(weight).recipes:
        assert found.split()[0] not in scales or found.endswith(("fan-out", "5/3")) or found == name
        assert ("uniform" in found) == (name != "Xavier normal" and name != "Kaiming normal") or found == "torch default"


@pytest.mark.parametrize("size", [*SIZES, (500, 20)], ids=str)
@pytest.mark.parametrize("gain", [1.0, math.sqrt(2)])
def test_an_orthogonal_weight_is_recognized_with_its_gain(size, gain):
    weight = torch.empty(size)
    init.orthogonal_(weight, gain)
    found = recognize_initialization(weight)
    assert found.shape == "orthogonal"
    assert found.recipes == (f"orthogonal, gain {1 if gain == 1 else 1.41}",)


def test_an_orthogonal_weight_is_recognized_in_bfloat16():
    weight = torch.empty(64, 64)
    init.orthogonal_(weight)
    assert recognize_initialization(weight.bfloat16()).shape == "orthogonal"


def test_a_truncated_normal_is_distinguished_from_a_normal_one():
    weight = torch.empty(400, 400)
    assert recognize_initialization(init.trunc_normal_(weight, std=0.5, a=-1, b=1)).shape == "truncated normal"
    assert recognize_initialization(init.normal_(weight, std=0.02)).name == "normal with std 0.02"


def test_zeros_constants_and_the_identity_are_recognized():
    assert recognize_initialization(torch.zeros(20, 20)).recipes == ("zeros",)
    assert recognize_initialization(torch.full((20, 20), 0.5)).recipes == ("constant 0.5",)
    assert recognize_initialization(torch.eye(20)).recipes == ("identity",)


def test_trained_weights_have_no_recipe():
    weight = torch.randn(200, 200) * torch.linspace(0.1, 3, 200)
    assert recognize_initialization(weight).recipes == ()


def test_defaults_of_recurrent_layers_embeddings_and_attention_are_recognized():
    model = nn.ModuleDict({"e": nn.Embedding(100, 32), "r": nn.LSTM(16, 32), "a": nn.MultiheadAttention(32, 4)})
    names = {name: layer.initialization.name for name, layer in analyze(model).layers.items()}
    assert names["e.weight"] == names["r.weight_ih_l0"] == names["r.weight_hh_l0"] == "torch default"
    assert "Xavier uniform" in names["a.in_proj_weight"]


@pytest.mark.parametrize(
    ("prepare", "activation", "fit"),
    [
        (lambda w: init.kaiming_normal_(w, nonlinearity="relu"), nn.ReLU(), "fits"),
        (lambda w: init.xavier_uniform_(w, gain=5 / 3), nn.Tanh(), "fits"),
        (lambda w: init.orthogonal_(w, gain=math.sqrt(2)), nn.ReLU(), "fits"),
        (lambda w: init.normal_(w, std=0.01), nn.ReLU(), "small"),
        (lambda w: init.normal_(w, std=1.0), nn.ReLU(), "large"),
        (lambda w: init.normal_(w, std=1.0), nn.BatchNorm1d(128), "fits"),
        (lambda w: init.zeros_(w), nn.ReLU(), "small"),
        (lambda w: init.normal_(w, std=1.0), nn.Hardsigmoid(), "could not tell"),
    ],
)
def test_the_fit_of_an_initialization_depends_on_the_next_activation(prepare, activation, fit):
    model = nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.1), activation, nn.Linear(128, 2))
    prepare(model[0].weight)
    assert analyze(model).layers["0.weight"].initialization.fit == fit


class Functional(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.function = function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def test_without_data_and_without_sequential_the_activation_is_unknown():
    found = analyze(Functional(torch.relu)).layers["first.weight"].initialisation
    assert found.fit == "could not tell"
    assert "pass data" in found.reason


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (torch.relu, "before ReLU"),
        (functional.gelu, "before GELU"),
        (torch.tanh, "before Tanh"),
        (lambda x: x, "no activation"),
        (lambda x: x.sin() ** 3, "not known"),
    ],
)
def test_with_data_a_function_between_two_layers_is_recognized_by_its_values(function, message):
    found = analyze(Functional(function), torch.randn(8, 32)).layers["first.weight"].initialisation
    assert message in found.reason


# ---- spectrum


@pytest.mark.parametrize("shape", [(20, 50), (128, 64), (16, 4, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_spectrum_agrees_with_float64(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    values = np.linalg.svd(weight.double().numpy().reshape(shape[0], -1), compute_uv=False)
    found = compute_spectrum(weight)
    shares = values / values.sum()
    assert found.largest == pytest.approx(values[0], rel=1e-5)
    assert found.smallest == pytest.approx(values[-1], rel=1e-5)
    assert found.condition == pytest.approx(values[0] / values[-1], rel=1e-5)
    assert found.stable_rank == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-5)
    assert found.effective_rank == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-5)
    assert found.sampled == ""


def test_a_large_matrix_is_sampled_and_marked_as_sampled():
    weight = torch.randn(700, 3000)
    found = compute_spectrum(weight)
    assert found.sampled == "512 x 512 of 700 x 3000"
    assert found.largest == pytest.approx(torch.linalg.matrix_norm(weight.double(), 2).item(), rel=2e-3)
    assert found.stable_rank == pytest.approx((weight.norm() / found.largest).item() ** 2, rel=1e-4)
    assert math.isnan(found.smallest)
    assert math.isnan(found.condition)
    assert not found.is_collapsed


@pytest.mark.parametrize("size", [64, 800])
def test_rank_collapse_is_found_in_small_and_in_sampled_matrices(size):
    collapsed = torch.randn(size, 3) @ torch.randn(3, size)
    found = compute_spectrum(collapsed)
    assert isinstance(found, WeightSpectrum)
    assert found.numerical_rank == 3
    assert found.is_collapsed
    assert not compute_spectrum(torch.randn(size, size)).is_collapsed


def test_rank_collapse_is_named_in_the_report():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(torch.outer(torch.randn(64), torch.randn(64)))
    report = analyze(model)
    assert report.collapsed_layers() == ["0.weight"]
    assert "rank collapse in 0.weight" in report.summary()


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.full((9, 9), math.nan), "NaN"),
        (torch.ones(5), "not a matrix"),
        (torch.ones(0, 5), "not a matrix"),
        (torch.ones(9, 9).int(), "int32"),
    ],
)
def test_a_weight_without_a_spectrum_has_a_reason(weight, why):
    assert why in compute_spectrum(weight)


def test_a_zero_matrix_has_rank_zero_and_is_not_collapsed():
    found = compute_spectrum(torch.zeros(20, 20))
    assert (found.largest, found.numerical_rank, found.effective_rank) == (0, 0, 0)
    assert not found.is_collapsed


def test_the_random_state_of_the_user_does_not_change():
    state = torch.get_rng_state()
    model = nn.Sequential(nn.Linear(32, 700), nn.Dropout(0.5), nn.Linear(700, 700))
    torch.set_rng_state(state)
    analyze(model, torch.ones(4, 32))
    assert torch.equal(torch.get_rng_state(), state)


# ---- dead units


def units(report, evidence):
    return {(neuron.layer, neuron.unit) for neuron in report.dead_neurons(evidence)}


def relu_net():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))


def test_a_healthy_model_has_no_dead_neurons():
    for model, data in [
        (relu_net(), torch.randn(256, 20)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()), torch.randn(4, 3, 12, 12)),
        (nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 2)), torch.randn(128, 20)),
    ]:
        assert analyze(model, data).dead_neurons() == []


def test_zero_and_constant_rows_are_dead_by_their_weights():
    model = relu_net()
    with torch.no_grad():
        model[0].weight[5] = 0
        model[0].weight[7] = 0.25
        model[2].weight[3] *= 1e-9
    report = analyze(model)
    assert units(report, "weights") == {("0", 5), ("0", 7), ("2", 3)}
    reasons = {neuron.unit: neuron.reason for neuron in report.dead_neurons()}
    assert "zero" in reasons[5]
    assert "sum of its inputs" in reasons[7]
    assert "median unit" in reasons[3]


def test_a_layer_that_starts_at_zero_as_a_whole_has_no_dead_neurons():
    model = relu_net()
    init.zeros_(model[4].weight)
    assert analyze(model).dead_neurons() == []


def test_a_large_negative_bias_before_relu_is_dead_by_weights_and_by_activations():
    model = relu_net()
    with torch.no_grad():
        model[2].bias[:4] = -100
    report = analyze(model, torch.randn(200, 20))
    assert units(report, "weights") == {("2", unit) for unit in range(4)} <= units(report, "activations")
    assert {neuron.evidence for neuron in report.dead_neurons()} == {"weights", "activations"}


def test_a_positive_output_overrules_the_argument_from_the_bias():
    model = relu_net()
    with torch.no_grad():
        model[0].bias[0] = -100
    assert units(analyze(model), "weights") == {("0", 0)}
    assert analyze(model, 1000 * torch.randn(200, 20)).dead_neurons() == []


def test_a_bias_below_zero_is_no_evidence_without_a_relu():
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3))
    with torch.no_grad():
        model[0].bias[0] = -100
    assert analyze(model).dead_neurons() == []


def test_a_dead_channel_of_a_convolution_is_found_behind_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        model[1].bias[6] = -50
    assert units(analyze(model, torch.randn(4, 3, 10, 10)), "activations") == {("0", 6)}


def test_a_functional_relu_is_found_too():
    model = Functional(torch.relu)
    with torch.no_grad():
        model.first.bias[2] = -100
    assert ("first", 2) in units(analyze(model, torch.randn(100, 32)), "activations")


def test_a_unit_is_dead_only_if_no_batch_activates_it():
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    ones = torch.ones(100, 1)
    assert units(analyze(model, ones), "activations") == {("0", 1)}
    assert analyze(model, [ones, -ones]).dead_neurons() == []


def test_too_few_samples_report_no_dead_unit_with_a_note():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
    report = analyze(model, torch.randn(2, 20))
    assert report.dead_neurons() == []
    assert "only 2 values per unit" in report.summary()


def test_the_model_does_not_change():
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    analyze(model, torch.randn(100, 20))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_data_that_do_not_fit_the_model_raise_a_clear_error_and_leave_no_hook():
    model = relu_net()
    model.train()
    with pytest.raises(SondeError, match="could not be run with these inputs"):
        analyze(model, torch.randn(4, 7))
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- statistics and report


def test_mean_and_std_are_over_all_weights_and_agree_with_float64():
    model = nn.Sequential(nn.Linear(50, 40), nn.LayerNorm(40), nn.Linear(40, 10))
    everything = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    report = analyze(model)
    assert report.mean() == pytest.approx(everything.mean().item(), rel=1e-5)
    assert report.std() == pytest.approx(everything.std(unbiased=False).item(), rel=1e-5)


def test_a_tied_weight_is_counted_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert list(analyze(model).layers) == ["embedding.weight"]


def test_nonfinite_and_lazy_weights_are_reported():
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    report = analyze(model)
    assert "(1 not finite)" in report.summary()
    assert units(report, "weights") == {("0", 0)}
    assert "lazy" in report.layers["1.weight"].stats.unsupported


def test_the_summary_names_the_issues_and_the_notebook_view_escapes():
    model = nn.Sequential()
    model.add_module("<b>x", nn.Linear(64, 64))
    report = analyze(model)
    assert "<b>x" in report.summary()
    assert "<b>x" not in report._repr_html_()
    assert "pass data" in report.summary()


def test_the_histogram_is_written_for_a_model_of_any_kind(tmp_path):
    pytest.importorskip("matplotlib")
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4), nn.Linear(8, 8).to(torch.bfloat16))
    path = WeightAnalyzer().plot_weight_histogram(model, tmp_path / "new" / "w.png")
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: WeightAnalyzer().analyze_model(torch.ones(3)), "TensorInspector"),
        (lambda: WeightAnalyzer().plot_weight_histogram(nn.ReLU(), "w.png"), "nothing to plot"),
        (lambda: WeightAnalyzer().plot_weight_histogram(nn.Linear(2, 2), "w.png", bins=0), "bins"),
    ],
)
def test_a_wrong_argument_raises_a_clear_error(wrong, message):
    with pytest.raises(SondeError, match=message):
        wrong()


def _with_dead_units():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[:3] = 0
        model[0].bias[:3] = -1
    return model


def test_a_unit_that_is_dead_by_weights_and_by_data_is_listed_once():
    report = WeightAnalyzer().analyze_model(_with_dead_units(), torch.randn(100, 4))
    assert [neuron.unit for neuron in report.dead_neurons()] == [0, 1, 2]
    assert [neuron.unit for neuron in report.dead_neurons("activations")] == [0, 1, 2]
    assert "3 dead neurons" in report.summary()
    assert str(report.dead_neurons()[0]) == "unit 0 of 0: all of its weights are zero, so its output does not depend on the input"
    with pytest.raises(SondeError, match='"weights", "activations" or None'):
        report.dead_neurons("typo")


def test_a_bare_layer_is_named_by_its_class():
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[1] = 0
    report = WeightAnalyzer().analyze_model(layer)
    assert [neuron.layer for neuron in report.dead_neurons()] == ["Linear"]
    assert "dead in Linear (by weights): unit 1; unit 1: all of its weights are zero" in report.summary()


def test_the_summary_of_one_parameter_prints_as_a_short_text():
    lines = str(WeightAnalyzer().analyze_model(_with_dead_units()).layers["2.weight"]).splitlines()
    assert lines[0] == "2.weight: float32 2x8"
    assert lines[1].startswith("  16 numbers: mean ")
    assert len(lines) == 4
