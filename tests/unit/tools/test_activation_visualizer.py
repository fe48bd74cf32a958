"""ActivationVisualizer: bounded copies of outputs, their statistics and plots; training is not affected."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from sonde import ActivationVisualizer, SondeError  # noqa: E402

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.ff(x + self.attention(x, x, x)[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.layer:
            x = block(x)
        return {"out": x, "pair": (x.sum(), None)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def test_the_snippet_of_the_description_runs_as_written(model, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, "layer.0.attention")
    model(torch.randn(2, 5, 16))
    activations = visualizer.get_activations("layer.0.attention")
    visualizer.plot_heatmap(activations, "x.png")
    visualizer.plot_distribution(activations, "y.png")
    assert activations.shape == (2, 5, 16)
    assert {path.name for path in tmp_path.iterdir()} == {"x.png", "y.png"}


def test_the_copy_has_the_value_at_the_hook_before_later_in_place_changes(model):
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, ["layer.0.ff.0", "layer.0.ff.1"])
    model(torch.randn(2, 5, 16))
    before, after = visualizer.get_activations("layer.0.ff.0"), visualizer.get_activations("layer.0.ff.1")
    assert (before < 0).any()
    assert torch.equal(after, before.relu())


def test_the_users_later_changes_do_not_reach_the_copy():
    layer = nn.Identity()
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(layer, "Identity")
    x = torch.ones(3)
    layer(x)
    x.zero_()
    assert visualizer.get_activations("Identity").tolist() == [1, 1, 1]


def test_a_pattern_hooks_every_layer_that_it_matches(model):
    visualizer = ActivationVisualizer()
    assert visualizer.register_forward_hook(model, "layer.*.attention") == [f"layer.{i}.attention" for i in range(3)]
    assert visualizer.register_forward_hook(model, r"re:^layer\.[12]\.ff$") == ["layer.1.ff", "layer.2.ff"]


def test_outputs_that_are_tuples_and_dicts_are_stored_by_index(model):
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, ["layer.0.attention", "Model"])
    out = model(torch.randn(2, 5, 16))
    assert visualizer.names() == ["layer.0.attention", "layer.0.attention:1", "Model", "Model:pair.0"]
    assert torch.equal(visualizer.get_activations("Model"), out["out"].detach())
    assert visualizer.get_activations("layer.0.attention:1").shape == (2, 5, 5)


def test_a_copy_is_bounded_and_its_statistics_are_those_of_the_whole():
    torch.manual_seed(0)
    layer = nn.Identity()
    visualizer = ActivationVisualizer(max_elements=1000)
    visualizer.register_forward_hook(layer, "Identity")
    x = torch.randn(300, 7, 90)
    x[200, 3, 50] = 1e4
    layer(x)
    stored = visualizer.get_activations("Identity")
    assert stored.numel() <= 1000
    assert stored.ndim == 3
    assert visualizer.is_sampled("Identity")
    stats = visualizer.statistics("Identity")
    exact = x.double()
    assert stats.shape == (300, 7, 90)
    assert (stats.num_elements, stats.max) == (x.numel(), 1e4)
    assert stats.mean == pytest.approx(exact.mean().item(), rel=1e-5)
    assert stats.std == pytest.approx(exact.std(unbiased=False).item(), rel=1e-5)
    assert stats.l2_norm == pytest.approx(exact.norm().item(), rel=1e-5)


def test_an_outlier_of_a_sample_has_its_index_in_the_whole():
    layer = nn.Identity()
    visualizer = ActivationVisualizer(max_elements=500)
    visualizer.register_forward_hook(layer, "Identity")
    x = torch.linspace(-1, 1, 2000).reshape(50, 40)
    layer(x)
    stored = visualizer.get_activations("Identity")
    strides = [-(-whole // part) for whole, part in zip(x.shape, stored.shape)]
    x[strides[0] * 3, strides[1] * 4] = 1e6
    layer(x)
    (outlier,) = visualizer.outliers("Identity")
    assert (outlier.index, outlier.value) == ((strides[0] * 3, strides[1] * 4), 1e6)


@pytest.mark.needs_bfloat16("linear")
def test_statistics_agree_with_float64_also_for_bfloat16():
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).to(torch.bfloat16)
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(layer, "Linear")
    out = layer(torch.randn(100, 64, dtype=torch.bfloat16)).detach().double().numpy()
    stats = visualizer.statistics("Linear")
    assert stats.mean == pytest.approx(out.mean(), rel=1e-5)
    assert stats.std == pytest.approx(out.std(), rel=1e-5)
    assert stats.median == pytest.approx(np.median(out), rel=1e-5)
    assert stats.dtype == "bfloat16"


def test_non_finite_values_are_counted_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    layer = nn.Identity()
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(layer, "Identity")
    layer(torch.full((4, 4), float("nan")))
    assert visualizer.statistics("Identity").num_nan == 16
    assert "16 NaN" in visualizer.summary()
    assert visualizer.plot_heatmap("Identity", tmp_path / "deep" / "n.svg").exists()
    assert visualizer.distribution("Identity").data["non_finite"] == {"NaN": 16}


def test_training_is_bit_identical_and_outputs_are_the_same_objects(model):
    def run(watched: bool):
        torch.manual_seed(1)
        net = Model()
        visualizer = ActivationVisualizer()
        if watched:
            visualizer.register_forward_hook(net, "*")
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(2, 5, 16))["out"].square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()], torch.get_rng_state()

    (bare, bare_state), (watched, watched_state) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched))
    assert torch.equal(bare_state, watched_state)


def test_remove_leaves_no_hook_and_stored_outputs_can_be_freed(model):
    with ActivationVisualizer() as visualizer:
        visualizer.register_forward_hook(model, "layer.*")
        visualizer.register_forward_hook(model, "layer.0.ff")  # a second call: still one hook
        assert len(model.layer[0].ff._forward_hooks) == 1
        model(torch.randn(1, 2, 16))
    assert not any(module._forward_hooks for module in model.modules())
    assert visualizer.names()
    visualizer.clear()
    assert visualizer.names() == []


def test_neither_the_output_nor_its_graph_nor_the_model_is_kept_alive():
    model = nn.Linear(4, 4)
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, "Linear")
    out = model(torch.ones(2, 4))
    captured, weight = weakref.ref(out), weakref.ref(model.weight)
    del out, model
    gc.collect()
    assert captured() is None
    assert weight() is None
    assert not visualizer.get_activations("Linear").requires_grad


def test_an_output_stored_in_inference_mode_can_be_used_outside(model):
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, "layer.0")
    with torch.inference_mode():
        model(torch.randn(1, 2, 16))
    assert not visualizer.get_activations("layer.0").is_inference()


def test_a_copy_and_a_pickle_of_a_hooked_model_are_not_hooked(model):
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, "layer.0")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(1, 2, 16))
    assert visualizer.names() == []


def test_a_compiled_model_still_compiles_as_one_graph():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, "0")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 4)), model[1](model[0](torch.ones(1, 4))))


def test_an_unknown_layer_gets_the_nearest_names(model):
    with pytest.raises(SondeError, match=r"Nearest: layer\.\d\.attention"):
        ActivationVisualizer().register_forward_hook(model, "layer.0.atention")


def test_a_pattern_that_matches_nothing_warns_once(model, caplog):
    with caplog.at_level(logging.WARNING, "sonde"):
        assert ActivationVisualizer().register_forward_hook(model, "decoder.*") == []
    assert len(caplog.records) == 1


def test_a_layer_that_has_not_run_has_another_error_than_an_unknown_one(model):
    visualizer = ActivationVisualizer()
    with pytest.raises(SondeError, match="No output is stored yet"):
        visualizer.get_activations("layer.0")
    visualizer.register_forward_hook(model, "layer.0")
    with pytest.raises(SondeError, match="Run the model first"):
        visualizer.get_activations("layer.0")
    model(torch.randn(1, 2, 16))
    with pytest.raises(SondeError, match=r"Nearest: .*layer\.0"):
        visualizer.get_activations("layer.9")


def test_an_output_that_cannot_be_read_disables_only_its_hook(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("meta")
    visualizer = ActivationVisualizer()
    visualizer.register_forward_hook(model, "0")
    with caplog.at_level(logging.WARNING, "sonde"):
        for _ in range(2):
            model(torch.ones(1, 2, device="meta"))
    assert [record.message for record in caplog.records] == [
        "the output of 0 is not observed any more: TypeError: meta tensors hold no values"
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda v: ActivationVisualizer(max_elements=0), "max_elements"),
        (lambda v: v.register_forward_hook("model", "a"), "torch.nn.Module"),
        (lambda v: v.plot_distribution([1.0], "x.png", bins=-3), "bins"),
        (lambda v: v.plot_heatmap([[1.0]], "x.doc"), "doc"),
    ],
)
def test_a_wrong_argument_raises_a_clear_error(wrong, message):
    with pytest.raises(SondeError, match=message):
        wrong(ActivationVisualizer())


def test_a_layer_without_a_hook_is_told_from_a_name_that_does_not_exist():
    model, visualizer = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), ActivationVisualizer()
    visualizer.register_forward_hook(model, "0")
    model(torch.ones(2, 4))
    with pytest.raises(SondeError, match=r'1 is a layer of the model, but .* it had no hook(.|\n)*register_forward_hook\(model, "1"\)'):
        visualizer.get_activations("1")
    with pytest.raises(SondeError, match="no layer is named '11'\\.\nNearest: 1"):  # which has no hook
        visualizer.get_activations("11")


def test_the_statistics_of_a_layer_print_as_a_short_text():
    model, visualizer = nn.Sequential(nn.Linear(4, 8)), ActivationVisualizer()
    visualizer.register_forward_hook(model, "0")
    model(torch.ones(2, 4))
    lines = str(visualizer.statistics("0")).splitlines()
    assert lines[0] == "float32 [2, 8] on cpu, 64 bytes"
    assert lines[1].startswith("mean ± std   ")
    assert len(lines) < 12
    assert max(map(len, lines)) < 120


@pytest.mark.parametrize("method", ["plot_heatmap", "plot_distribution"])
def test_none_is_no_path(method):
    with pytest.raises(SondeError, match="needs a path, not None"):
        getattr(ActivationVisualizer(), method)(torch.ones(2, 3), None)
