"""DebugVisualizer: files from tensors, safe file names, the dashboard page, and installed plug-ins."""

import gc
import json
import math
import sys
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from sonde import DebugVisualizer, SondeError, VisualizationConfig  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def visualizer(tmp_path):
    return DebugVisualizer(VisualizationConfig(output_directory=tmp_path / "plots", format="json"))


def read(path):
    return json.loads(path.read_text())


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def test_plots_of_a_training_are_combined_on_one_page(tmp_path):
    visualizer = DebugVisualizer(VisualizationConfig(output_directory=tmp_path, format="png", dpi=60))
    net, steps = model(), list(range(6))
    norms = {name: [] for name, _ in net.named_parameters()}
    for _ in steps:
        net(torch.randn(8, 6)).square().sum().backward()
        for name, parameter in net.named_parameters():
            norms[name].append(parameter.grad.norm() * parameter.sum() ** 0)  # with a graph, as a loss would have
    paths = [
        visualizer.plot_tensor_distribution("output", net(torch.randn(8, 6)), 20),
        visualizer.plot_gradient_flow("gradients", steps, norms),
        visualizer.plot_layer_heatmap("norms", list(norms), steps, [list(row) for row in norms.values()], label="gradient norm"),
        visualizer.plot_weight_histogram("weights", net),
        visualizer.plot_activation_heatmap("hidden", net[1](net[0](torch.randn(8, 6)))),
    ]
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG"] * 5
    assert visualizer.get_plot_names() == ["output", "gradients", "norms", "weights", "hidden"]
    page = visualizer.create_dashboard(visualizer.get_plot_names())
    assert page.name == "dashboard.html"
    assert page.read_text().count("<svg") == 5
    assert visualizer._repr_html_().count("<svg") == 5


@pytest.mark.parametrize("format", ["png", "svg", "pdf", "html", "json", "data", "PNG", ".svg"])
def test_every_format_is_written_under_its_suffix(tmp_path, format):
    path = DebugVisualizer(VisualizationConfig(str(tmp_path), format)).plot_tensor_distribution("a", [1.0])
    assert path == tmp_path / f"a.{'json' if format == 'data' else format.lower().removeprefix('.')}"
    assert path.stat().st_size > 50


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0], dtype=torch.float8_e5m2),
        torch.tensor([1.0, 2.0], requires_grad=True) * 1,
        torch.tensor([1, 2], dtype=torch.uint16),
        torch.tensor([1.0, 2.0]).to_sparse(),
        torch.tensor([1j, 2.0]),
        torch.tensor([1.0, 2.0]).expand(1, 2).T,
        -torch.tensor([1j, 2j]).conj().imag,
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_tensors_of_every_kind_are_plotted_with_their_values(visualizer, tensor):
    data = read(visualizer.plot_tensor_distribution("t", tensor))
    assert data["num_values"] == 2
    assert [data["quantiles"]["0.05"], data["quantiles"]["0.95"]] == pytest.approx([1.05, 1.95])
    assert data["edges"][-1] == pytest.approx(2.5 if tensor.dtype is torch.uint16 else 2.0)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_plotted_dequantized(visualizer):
    data = read(visualizer.plot_tensor_distribution("q", torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8)))
    assert data["edges"][0] == 1.0


def test_a_tensor_is_neither_changed_nor_kept_alive(visualizer):
    tensor = torch.randn(100, requires_grad=True)
    copy, version, gone = tensor.detach().clone(), tensor._version, weakref.ref(tensor)
    visualizer.plot_tensor_distribution("t", tensor)
    visualizer.plot_activation_heatmap("a", tensor)
    assert torch.equal(tensor, copy)
    assert tensor._version == version
    del tensor
    gc.collect()
    assert gone() is None


def test_a_later_in_place_change_does_not_change_the_plot(visualizer):
    tensor = torch.ones(4, 4, dtype=torch.float64)
    visualizer.plot_activation_heatmap("a", tensor)
    tensor.fill_(9.0)
    assert visualizer.get_plot("a").data["values"] == [[1.0] * 4] * 4


def test_plotting_does_not_change_the_random_state(visualizer):
    state = torch.get_rng_state()
    visualizer.plot_weight_histogram("w", torch.nn.utils.parameters_to_vector(torch.nn.ParameterList([torch.ones(3)])))
    assert torch.equal(torch.get_rng_state(), state)


def test_all_nan_and_empty_values_are_drawn(visualizer):
    assert read(visualizer.plot_tensor_distribution("nan", torch.full((3,), math.nan)))["non_finite"] == {"NaN": 3}
    assert read(visualizer.plot_tensor_distribution("none", torch.empty(0)))["num_values"] == 0


def test_a_meta_tensor_and_a_negative_number_of_bins_raise_a_clear_error(visualizer):
    with pytest.raises(SondeError, match="meta tensor"):
        visualizer.plot_tensor_distribution("m", torch.empty(3, device="meta"))
    with pytest.raises(SondeError, match="bins=-4"):
        visualizer.plot_tensor_distribution("m", [1.0], -4)
    assert visualizer.get_plot_names() == []


# ---- files


def test_files_of_all_names_stay_in_the_directory_and_are_distinct(visualizer, tmp_path):
    names = ["layer/0 weird:name", "layer_0_weird_name", "../../outside", "layer 0/weird:name", "Layer_0_weird_name", "dashboard"]
    paths = [visualizer.plot_tensor_distribution(name, [float(i)]) for i, name in enumerate(names)]
    assert len(set(paths)) == len(names)
    assert {path.resolve().parent for path in paths} == {(tmp_path / "plots").resolve()}
    assert [read(path)["name"] for path in paths] == names


def test_the_same_name_replaces_the_plot(visualizer):
    first = visualizer.plot_tensor_distribution("a", [1.0])
    assert visualizer.plot_tensor_distribution("a", [1.0, 2.0]) == first
    assert read(first)["num_values"] == 2
    assert visualizer.get_plot_names() == ["a"]


def test_a_page_named_like_the_dashboard_does_not_replace_it(tmp_path):
    visualizer = DebugVisualizer(VisualizationConfig(tmp_path, "html"))
    assert visualizer.plot_tensor_distribution("dashboard", [1.0]) != visualizer.create_dashboard()


def test_a_directory_that_cannot_be_written_raises_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SondeError, match="cannot be made"):
        DebugVisualizer(VisualizationConfig(tmp_path / "file")).plot_tensor_distribution("a", [1.0])


@pytest.mark.parametrize("wrong", [{"format": "jpeg"}, {"dpi": 0}, {"dpi": True}, {"dpi": 1e9}])
def test_an_invalid_setting_is_refused(wrong):
    with pytest.raises(SondeError, match=next(iter(wrong))):
        VisualizationConfig(**wrong)


def test_the_nearest_plots_are_suggested(visualizer):
    visualizer.plot_tensor_distribution("gradients", [1.0])
    with pytest.raises(SondeError, match="Nearest: gradients"):
        visualizer.create_dashboard(["gradient"])


def test_an_empty_dashboard_has_a_message(visualizer):
    visualizer.plot_tensor_distribution("not asked for", [1.0])
    assert "0 pictures" in visualizer.create_dashboard([]).read_text()
    assert "1 picture<" in visualizer.create_dashboard("not asked for").read_text()


# ---- plug-ins

PLUGIN = """
from sonde.render.plots import Plot, distribution

def ring(*, name, radius):
    return Plot(name, lambda figure: figure.add_subplot().set_title(str(radius)), data={"kind": "ring", "radius": radius})

def broken(**data):
    raise ZeroDivisionError("radius of nothing")

def wrong(**data):
    return "not a plot"

def particular(*, name, radius):
    return distribution([1.0], name=name, bins=radius)
"""
POINTS = """[sonde.plots]
ring = sonde_rings:ring
broken = sonde_rings:broken
wrong = sonde_rings:wrong
absent = sonde_rings_of_yesterday:ring
particular = sonde_rings:particular
distribution = sonde_rings:broken
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """An installed distribution with its own plots."""
    site = tmp_path / "site"
    info = site / "sonde_rings-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "sonde_rings.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sonde-rings\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("sonde_rings", None)


def test_a_plot_of_a_plugin_is_drawn_by_name(visualizer, plugins):
    assert read(visualizer.plot("ring", "my ring", radius=3)) == {"name": "my ring", "title": "my ring", "kind": "ring", "radius": 3}
    assert visualizer.create_dashboard().read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [("broken", "ZeroDivisionError: radius of nothing"), ("wrong", "returned a str"), ("absent", "sonde_rings_of_yesterday")],
)
def test_a_broken_plugin_is_logged_and_costs_one_plot(visualizer, plugins, caplog, kind, message):
    assert visualizer.plot(kind, "x", radius=1) is None
    assert message in caplog.text
    assert kind in caplog.text
    assert visualizer.plot("ring", "y", radius=1)
    assert visualizer.get_plot_names() == ["y"]


def test_a_plugin_does_not_replace_a_built_in_plot(visualizer, plugins):
    assert read(visualizer.plot("distribution", "d", values=torch.ones(3)))["kind"] == "distribution"


def test_a_sonde_error_from_a_plugin_reaches_the_user(visualizer, plugins):
    with pytest.raises(SondeError, match="bins=-1"):
        visualizer.plot("particular", "x", radius=-1)


def test_an_unknown_kind_is_answered_with_the_nearest(visualizer, plugins):
    with pytest.raises(SondeError, match="Nearest: ring"):
        visualizer.plot("rings", "x")


def test_a_directory_is_enough_to_configure_it(tmp_path):
    path = DebugVisualizer(str(tmp_path / "plots")).plot_tensor_distribution("a", [1.0, 2.0])
    assert path.parent == tmp_path / "plots"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: DebugVisualizer(3), "VisualizationConfig or a directory, not a int"),
        (lambda: VisualizationConfig(output_directory=None), "output_directory=None: must be a path"),
        (lambda: VisualizationConfig(output_directory=""), "must be a path"),
        (lambda: DebugVisualizer().plot_tensor_distribution(None, [1.0]), "A plot needs a name"),
        (lambda: DebugVisualizer().plot_gradient_flow(3, [1], [1.0]), "A plot needs a name"),
        (lambda: DebugVisualizer().plot("distribution", "", values=[1.0]), "A plot needs a name"),
    ],
)
def test_a_wrong_argument_is_answered_with_a_sentence(wrong, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SondeError, match=message):
        wrong()
    assert not list(tmp_path.iterdir())


def test_clear_forgets_the_plots_and_leaves_the_files(tmp_path):
    visualizer = DebugVisualizer(tmp_path)
    path = visualizer.plot_tensor_distribution("a", [1.0, 2.0])
    visualizer.clear()
    assert visualizer.get_plot_names() == []
    assert path.exists()
