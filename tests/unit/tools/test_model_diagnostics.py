"""ModelDiagnostics on real models: depth and receptive field compared with autograd, health scores of real runs."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import model_examples  # noqa: E402
import sonde  # noqa: E402
from fixed_programs import PROGRAMS, write_fixed  # noqa: E402
from program_runner import run_under_sonde  # noqa: E402
from sonde import ModelArchitectureInfo, ModelDiagnostics, ModelPerformanceMetrics, SondeError  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# ---- architecture


def test_parameters_are_counted_once_and_trainable_ones_separately():
    model = model_examples.Tied()
    model.mix.requires_grad_(False)
    info = ModelDiagnostics().inspect(model)
    unique = {id(p): p for p in model.parameters()}.values()
    assert info.total_parameters == sum(p.numel() for p in unique)
    assert info.trainable_parameters == sum(p.numel() for p in unique if p.requires_grad)
    assert info.model_size_mb == pytest.approx(sum(p.nbytes for p in unique) / 2**20)
    assert info.trainable_share == pytest.approx(info.trainable_parameters / info.total_parameters)


@pytest.mark.parametrize(
    "name, inputs, depth",
    [
        ("mlp", torch.zeros(2, 6), 3),
        ("residual", torch.zeros(2, 3, 4, 4), 3),
        ("lstm", torch.zeros(2, 3, 6), 3),  # two layers of cells, and the head
        ("transformer", torch.zeros(2, 5, dtype=torch.long), 10),  # embedding, twice (in, out, up, down), head
        ("attention", torch.zeros(2, 3, 6), 3),
        ("shared", torch.zeros(2, 6), 4),  # one block, called three times
        ("dict output", torch.zeros(2, 6), 1),  # two parallel branches
        ("parametrized", torch.zeros(2, 6), 2),
        ("dataclass output", torch.zeros(2, 6), 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_depth_is_the_longest_path_through_layers_with_weights(name, inputs, depth):
    info = ModelDiagnostics().inspect(model_examples.BY_NAME[name].build(), inputs)
    assert (info.depth, info.depth_known_by) == (depth, "a forward pass")


def test_without_inputs_depth_is_the_order_or_an_upper_bound():
    assert ModelDiagnostics().inspect(model_examples.mlp()).depth_known_by == "the order of modules"
    branches = ModelDiagnostics().inspect(model_examples.Halves())
    assert branches.depth == 2
    assert "upper bound" in branches.depth_known_by


class Skip(nn.Module):
    """The sum of a narrow and a wide branch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv1d(2, 2, 5, padding=2), nn.Tanh(), nn.Conv1d(2, 2, 5, padding=2))
        self.narrow = nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + self.narrow(x)


STACKS = {
    "plain": nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 3, 5), nn.Tanh()),
    "strided": nn.Sequential(nn.Conv1d(2, 3, 3, stride=2), nn.Conv1d(3, 3, 3, stride=3), nn.Conv1d(3, 2, 2)),
    "dilated": nn.Sequential(nn.Conv1d(2, 3, 3, dilation=4), nn.Conv1d(3, 3, 3, dilation=2)),
    "pooled": nn.Sequential(nn.Conv1d(2, 3, 3), nn.AvgPool1d(4), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 3)),
    "skip": Skip(),
    "transposed": nn.Sequential(nn.Conv1d(2, 3, 3, stride=2), nn.ConvTranspose1d(3, 3, 4, stride=2), nn.Conv1d(3, 3, 3)),
}


@pytest.mark.parametrize("name", STACKS)
def test_the_receptive_field_agrees_with_the_gradient_of_one_unit(name):
    model = STACKS[name].double()
    info = ModelDiagnostics().inspect(model, torch.zeros(1, 2, 96, dtype=torch.float64))
    x = torch.randn(1, 2, 96, dtype=torch.float64, requires_grad=True)
    output = model.eval()(x)
    widest = 0
    for place in range(output.shape[-1] // 2 - 3, output.shape[-1] // 2 + 4):  # neighboring units may use different inputs
        (gradient,) = torch.autograd.grad(output[0, 0, place], x, retain_graph=True)
        used = gradient.abs().sum((0, 1)).nonzero().flatten()
        widest = max(widest, int(used[-1] - used[0]) + 1)
    assert info.receptive_field == (widest,)


def test_a_rectangular_kernel_has_a_rectangular_field():
    info = ModelDiagnostics().inspect(nn.Sequential(nn.Conv2d(1, 1, (3, 5), stride=(1, 2)), nn.Conv2d(1, 1, 3)))
    assert info.receptive_field == (5, 9)
    assert info.receptive_stride == (1.0, 2.0)


def test_an_unknown_order_of_convolutions_has_a_note_and_a_model_without_convolutions_has_none():
    assert "inspect(model, inputs)" in ModelDiagnostics().inspect(model_examples.Residual()).receptive_note
    assert ModelDiagnostics().inspect(model_examples.mlp()).receptive_note == ""


def test_inspect_does_not_change_the_model():
    model = model_examples.conv()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    ModelDiagnostics().inspect(model, torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training and not module._forward_hooks for module in model.modules())


def test_a_frozen_model_is_traced_too():
    model = model_examples.mlp().requires_grad_(False)
    info = ModelDiagnostics().inspect(model, torch.zeros(2, 6))
    assert (info.depth, info.trainable_parameters, info.depth_known_by) == (3, 0, "a forward pass")


def test_wrong_arguments_raise_a_clear_error():
    tool = ModelDiagnostics()
    with pytest.raises(SondeError, match=r"torch\.nn\.Module"):
        tool.inspect("resnet")
    with pytest.raises(SondeError, match="could not be run"):
        tool.inspect(model_examples.mlp(), torch.zeros(2, 7))
    with pytest.raises(SondeError, match="ModelPerformanceMetrics"):
        tool.record_performance(0.5)
    with pytest.raises(SondeError, match=r"inspect\(model\)"):
        tool.record_architecture(model_examples.mlp())
    with pytest.raises(SondeError, match="ahead"):
        tool.analyze(ahead=0)


# ---- a training


def train(session_model: nn.Module, steps: int, lr: float) -> None:
    optimizer = torch.optim.SGD(session_model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(32, 6)
        optimizer.zero_grad()
        nn.functional.mse_loss(session_model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def test_the_diagnostics_of_a_session_read_its_own_run(tmp_path):
    model = model_examples.mlp()
    with sonde.watch(model, to=tmp_path / "run", strict=True) as session:
        tool = session.model_diagnostics
        train(model, 80, 0.05)
        report = tool.analyze()
        assert session.model_diagnostics is tool
    assert report.dynamics.num_steps >= 79
    assert report.dynamics.learning in ("improving", "settled")
    assert report.architecture.depth == 3
    assert report.health_score > 85
    assert report.dynamics.efficiency.num_samples == pytest.approx(32 * report.dynamics.num_steps)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert report.parameter_efficiency == pytest.approx(report.dynamics.efficiency.removed_share / millions)


def test_validation_that_the_user_logs_is_found_in_the_run(tmp_path):
    model = model_examples.mlp()
    with sonde.watch(model, to=tmp_path / "run", strict=True) as session:
        for value in (1.0, 0.8, 0.7, 0.65, 0.6):
            train(model, 8, 0.05)
            session.log(val_loss=value)
    report = ModelDiagnostics.from_run(tmp_path / "run").analyze()
    assert [value for _, value in report.validation_losses] == pytest.approx([1.0, 0.8, 0.7, 0.65, 0.6])
    assert report.dynamics.overfitting.is_overfitting is False


def test_metrics_accept_tensors_and_the_plot_is_written(tmp_path):
    tool = ModelDiagnostics()
    tool.record_architecture(ModelArchitectureInfo(total_parameters=100, trainable_parameters=50))
    for step in range(60):
        loss = torch.tensor(2.0 * 0.95**step if step != 50 else float("nan"), requires_grad=True)
        tool.record_performance(ModelPerformanceMetrics(training_step=step, loss=loss))
    report = tool.analyze()
    assert report.plot(tmp_path / "d.png").data["losses"]["series"]["training"]["values"][50] != report.losses[49][1]
    assert (tmp_path / "d.png").stat().st_size > 10_000
    assert report.architecture.trainable_share == 0.5


def test_the_score_is_an_attribute_steps_may_have_a_time_and_clear_forgets_them():
    tool = ModelDiagnostics()
    assert tool.health_score is None
    now = datetime(2026, 1, 2, tzinfo=UTC)
    tool.record_architecture(ModelArchitectureInfo(total_parameters=1))
    for step in range(40):
        tool.record_performance(ModelPerformanceMetrics(training_step=step, loss=2.0 * 0.9**step, timestamp=now if step else 1.7e9))
    assert tool.health_score == tool.analyze().health_score > 85
    assert tool.num_recorded == 40
    with pytest.raises(SondeError, match="timestamp must be one number"):
        ModelPerformanceMetrics(training_step=0, loss=1.0, timestamp="noon")
    tool.clear()
    assert (tool.num_recorded, tool.health_score, tool.analyze().architecture) == (0, None, None)


PAIRS = ["lr_divergence/autoencoder.py", "missing_optimizer_step/cnn.py"]


@pytest.mark.parametrize("program", PAIRS)
def test_a_broken_program_scores_lower_than_the_same_program_fixed(program, tmp_path):
    scores = []
    broken = PROGRAMS / "broken" / program
    for name, path in (("broken", broken), ("fixed", write_fixed(broken, tmp_path / "program"))):
        directory = tmp_path / name
        directory.mkdir()
        run, _, output = run_under_sonde(path, directory)
        score = ModelDiagnostics.from_run(run).analyze().health_score
        assert score is not None, output
        scores.append(score)
    assert scores[0] < scores[1] - 5
    assert scores[0] <= 85 < scores[1]
