"""StabilityChecker: margins in powers of two, issues by kind, and healthy models without issues."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.errors import SondeError  # noqa: E402
from sonde.tools.tensors.floating_point_formats import FORMATS, parse_format  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(name="checker")
def new_checker() -> sonde.StabilityChecker:
    return sonde.StabilityChecker()


def noise(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape)).float()


def kinds(issues) -> set[str]:
    return {issue.kind for issue in issues}


def test_formats_have_the_limits_of_torch():
    fp16, e4m3 = FORMATS["fp16"], FORMATS["fp8_e4m3"]
    assert (fp16.max, fp16.normal_log2, fp16.denormal_log2, fp16.mantissa_bits) == (65504.0, -14, -24, 10)
    assert (e4m3.max, e4m3.normal_log2, e4m3.denormal_log2, e4m3.mantissa_bits) == (448.0, -6, -9, 3)
    assert (FORMATS["fp32"].denormal_log2, FORMATS["bf16"].denormal_log2, FORMATS["fp64"].denormal_log2) == (-149, -133, -1074)


@pytest.mark.parametrize("name", ["fp16", "float16", "half", "FP16", torch.float16, "torch.float16"])
def test_a_format_has_several_names(name):
    assert parse_format(name).name == "fp16"


@pytest.mark.parametrize("name", ["fp12", torch.int8, None, ""])
def test_an_unknown_format_is_answered_with_all_formats(name):
    with pytest.raises(SondeError, match="Use one of fp64, fp32"):
        parse_format(name)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("fp16", 65504.0), ("bf16", 3.3895e38), ("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0), ("fp32", 3.4028e38)]
)
def test_the_margin_to_overflow_is_the_logarithm_of_the_ratio(checker, dtype, largest):
    checked = checker.check_tensor(torch.tensor([1.0, -100.0]))
    assert checked.margins(dtype).overflow_log2 == pytest.approx(math.log2(largest / 100), rel=1e-4)


def test_the_margin_to_underflow_ignores_the_smallest_percent(checker):
    numbers = torch.full((1000,), 2.0**-20)
    numbers[:5] = 2.0**-60  # half a percent, which does not count
    margins = checker.check_tensor(numbers).margins("fp16")
    assert margins.underflow_log2 == 4
    assert margins.flushed_share == 0.005
    assert margins.denormal_share == 0.995


def test_shares_agree_with_a_conversion_by_torch(checker):
    numbers = noise(100_000) * 2.0**-22
    margins = checker.check_tensor(numbers).margins("fp16")
    moved = numbers.to(torch.float16)
    assert margins.flushed_share == pytest.approx(((moved == 0) & (numbers != 0)).double().mean().item(), abs=1e-4)


CASES = {
    "nan": (lambda: torch.tensor([1.0, math.nan]), {"nan"}),
    "inf": (lambda: torch.tensor([1.0, -math.inf]), {"inf"}),
    "overflow": (lambda: torch.tensor([1.0, 3e38]), {"overflow"}),
    "overflow in fp16": (lambda: torch.tensor([1.0, 60000.0]).half(), {"overflow"}),
    "underflow": (lambda: torch.tensor([1e-40, 3e-41]), {"underflow", "denormal"}),
    "denormal": (lambda: torch.cat([noise(80), noise(20) * 1e-40]), {"denormal"}),
    "precision": (lambda: 1000 + 1e-4 * noise(1000), {"precision_loss"}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_issue_is_found_in_the_dtype_in_use(checker, case):
    make, expected = CASES[case]
    checker.check_tensor(make(), layer="encoder.0")
    issues = checker.get_issues()
    assert kinds(issues) == expected
    assert all(issue.layer == "encoder.0" and "encoder.0" in issue.message for issue in issues)


HEALTHY = {
    "normal": lambda: noise(1000),
    "small": lambda: noise(1000) * 1e-12,
    "large": lambda: noise(1000) * 1e12,
    "half": lambda: noise(1000).half(),
    "bf16": lambda: noise(1000).bfloat16(),
    "fp8, scaled to its edge": lambda: (noise(1000) * 150).clamp(-448, 448).to(torch.float8_e4m3fn),
    "zeros": lambda: torch.zeros(10),
    "constant": lambda: torch.full((10,), 0.1),
    "empty": lambda: torch.zeros(0),
    "integers": lambda: torch.arange(10),
    "complex": lambda: torch.complex(noise(10), noise(10)),
    "double": lambda: noise(10).double() * 1e-200,
    "relu": lambda: noise(1000).relu(),
    "sparse": lambda: noise(30, 30).relu().to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "list": lambda: [1.0, 2.0],
}


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_tensors_have_no_issue_in_their_own_dtype(checker, case):
    checker.check_tensor(HEALTHY[case]())
    assert checker.get_issues() == []


class Tiny(nn.Module):
    """Embedding, attention, dropout, normalization, in-place activation and a shared head, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.norm(self.act(self.block(self.embed(tokens)))))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(4), nn.Softmax(-1))


def recurrent() -> nn.Module:
    return nn.LSTM(8, 16, batch_first=True)


def next_token(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), torch.arange(24))


MODELS = {
    "transformer": (Tiny, lambda: torch.arange(24).reshape(2, 12), next_token),
    "convolutional": (convolutional, lambda: noise(4, 3, 8, 8), lambda out: -out.log()[:, 0].mean()),
    "recurrent": (recurrent, lambda: noise(2, 5, 8), lambda out: out[0].pow(2).mean()),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_healthy_models_have_no_issue_in_their_own_dtype(checker, name, dtype):
    make, inputs, loss = MODELS[name]
    torch.manual_seed(0)
    model = make()
    batch = inputs()
    model(batch)  # initializes lazy layers
    model = model.to(dtype)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    assert checker.check_model(model, batch, loss=loss) == []
    assert len(checker.checked) > 3
    assert any(one.what == "gradient" for one in checker.checked)


def test_a_check_does_not_change_the_model(checker):
    torch.manual_seed(0)
    model = Tiny().train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    checker.check_model(model, torch.arange(24).reshape(2, 12), loss=lambda out: out.sum())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.embed.weight.grad is None
    assert all(module.training and not module._forward_hooks for module in model.modules())


def test_hooks_are_removed_also_where_the_model_fails(checker):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(SondeError, match="could not be run with these inputs: RuntimeError"):
        checker.check_model(model, torch.zeros(2, 5))
    assert not any(module._forward_hooks for module in model.modules())


def test_the_layer_that_overflows_is_named(checker):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():
        model[2].weight[1, 1] = math.inf
    issues = checker.check_model(model, noise(8, 4).abs())
    assert {issue.layer for issue in issues} == {"2"}
    assert kinds(issues) & {"inf", "nan"}


def test_a_loss_that_is_not_a_number_raises_a_clear_error(checker):
    with pytest.raises(SondeError, match="must return one number"):
        checker.check_model(nn.Linear(2, 2), noise(3, 2), loss=lambda out: out)


def test_an_argument_that_is_not_a_model_raises_a_clear_error(checker):
    with pytest.raises(SondeError, match="not a Tensor"):
        checker.check_model(noise(3), noise(3))


def test_float32_numbers_that_float16_cannot_hold_are_safe_in_bfloat16(checker):
    checker.check_tensor(noise(1000) * 1e5, layer="scores")
    safety = checker.would_be_safe("fp16")
    assert not safety
    assert kinds(safety.issues) == {"overflow"}
    assert safety.overflow_log2 < 0
    assert checker.would_be_safe("bf16")
    assert checker.get_issues() == []
    assert "scores reaches" in str(safety)
    assert "bf16 would be safe" in str(checker.would_be_safe("bf16"))


def test_gradients_that_are_too_small_get_a_loss_scale_that_makes_them_safe(checker):
    gradient = noise(1000) * 1e-7
    checker.check_tensor(noise(1000), "hidden", what="output")
    checker.check_tensor(gradient, "hidden", what="gradient of output")
    safety = checker.would_be_safe("fp16")
    assert kinds(safety.issues) >= {"underflow"}
    assert safety.loss_scale_log2 is not None
    scaled = sonde.StabilityChecker()
    scaled.check_tensor(gradient * 2.0**safety.loss_scale_log2)
    assert scaled.would_be_safe("fp16")


def test_outputs_that_are_too_small_get_no_loss_scale(checker):
    checker.check_tensor(noise(1000) * 1e-9, "hidden", what="output")
    assert checker.would_be_safe("fp16").loss_scale_log2 is None


def test_without_a_checked_tensor_safety_raises_a_clear_error(checker):
    with pytest.raises(SondeError, match="Nothing was checked yet"):
        checker.would_be_safe("fp16")


def test_a_checked_tensor_prints_its_statistics_margins_and_issues(checker):
    lines = str(checker.check_tensor(torch.tensor([1.0, math.nan, 3.0]), "encoder")).splitlines()
    assert lines == [
        "tensor of encoder: 3 numbers: mean 2, std 1, 1 to 3, L2 norm 3.16, 0.0 % zeros, 1 NaN, 0 Inf",
        "margins in powers of two:",
        "          overflow  underflow",
        "fp32        +126.4       +149  in use",
        "fp16         +14.4        +24",
        "bf16        +126.4       +133",
        "fp8_e4m3      +7.2         +9",
        "fp8_e5m2     +14.2        +16",
        "The tensor of encoder holds 1 NaN among 3 numbers.",
    ]
    assert "none" in str(checker.check_tensor([math.nan]))
    assert "meta" in str(checker.check_tensor(torch.empty(2, device="meta")))


def test_a_tensor_without_a_name_is_named_by_its_number(checker):
    checker.check_tensor([1.0])
    checker.check_tensor([math.nan])
    (issue,) = checker.get_issues()
    assert (issue.layer, issue.message) == ("tensor 2", "Tensor 2 holds 1 NaN among 1 number.")


def test_a_model_that_is_one_layer_is_named_by_its_class(checker):
    (issue,) = checker.check_model(nn.Linear(2, 2), torch.tensor([[math.nan, 1.0]]))
    assert (issue.layer, issue.message) == ("Linear", "The output of Linear holds 2 NaN among 2 numbers.")


def test_the_summary_lists_every_tensor_with_its_margins(checker):
    checker.check_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), noise(8, 4))
    lines = checker.summary().splitlines()
    assert lines[0].split() == ["tensor", "in", "use", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
    assert lines[1].startswith("output of 0")
    assert "<table" in checker._repr_html_()


def test_the_plot_shows_every_tensor_and_is_readable_at_five_hundred(checker, tmp_path):
    pytest.importorskip("matplotlib")
    for number in range(500):
        checker.check_tensor(noise(100) * 2.0 ** (number % 40 - 20), f"encoder.layers.{number // 10}.part{number % 10}", what="output")
    plot = checker.plot(tmp_path / "m.png")
    assert len(plot.data["exponents"]) == 500
    assert (tmp_path / "m.png").stat().st_size < 400_000


def test_a_plot_without_tensors_is_drawn(checker, tmp_path):
    pytest.importorskip("matplotlib")
    checker.check_tensor(torch.zeros(3))
    checker.plot(tmp_path / "m.png")
    assert (tmp_path / "m.png").exists()


def test_tensors_of_nan_and_inf_are_marked_in_the_plot(checker):
    pytest.importorskip("matplotlib")
    checker.check_tensor(torch.full((10,), math.nan), "all")
    checker.check_tensor(torch.tensor([1.0, math.inf]), "some")
    checker.check_tensor(torch.zeros(5), "zero")
    plot = checker.plot()
    assert plot.data["notes"] == {"tensor of all": "10 NaN", "tensor of some": "1 Inf", "tensor of zero": "all zero"}
    shown = {text.get_text() for axes in plot.figure.axes for text in axes.texts} | {text.get_text() for text in plot.figure.texts}
    assert {"10 NaN", "1 Inf", "all zero", "NaN or Inf in 2 tensors"} <= shown
