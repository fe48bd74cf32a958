"""What pictures show: every value is somewhere in them, bad ones too, and any values give a picture."""

import io
import json
import math
import warnings

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sonde.errors import SondeError  # noqa: E402
from sonde.render import plots  # noqa: E402
from sonde.render.plots import figure_with_panels  # noqa: E402

RNG = np.random.default_rng(0)
BIG = [f"encoder.layer.{i // 10}.linear{i % 10}" for i in range(500)]


def words(plot):
    """Every text of the figure."""
    figure = plot.figure
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]


def png(plot):
    return plot.render("png", dpi=40)


# ---- distribution


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(), max_size=40), st.integers(1, 80))
def test_any_values_give_a_picture_in_which_each_of_them_is_counted(values, bins):
    plot = plots.distribution(values, bins=bins)
    assert sum(plot.data["counts"]) + sum(plot.data["non_finite"].values()) == len(values)
    assert png(plot).startswith(b"\x89PNG")


def test_counts_and_edges_are_those_of_numpy_where_the_axis_is_linear():
    values = RNG.normal(size=1000)
    data = plots.distribution(values, bins=20).data
    counts, edges = np.histogram(values, bins=20)
    assert data["counts"] == counts.tolist()
    assert data["edges"] == pytest.approx(edges.tolist())
    assert data["quantiles"]["0.5"] == pytest.approx(float(np.median(values)), abs=0.01)


def test_values_over_sixty_decades_fill_their_bins():
    data = plots.distribution(10 ** RNG.uniform(-30, 30, 3000), bins=30).data
    assert data["scale"] == "log"
    assert min(data["counts"]) > 30


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 5e-324, 0.0])
@pytest.mark.parametrize("bins", [1, 2, 64])
def test_one_value_at_the_end_of_what_floats_can_hold_has_its_bar(value, bins):
    plot = plots.distribution([value], bins=bins)
    assert sum(plot.data["counts"]) == 1
    assert all(map(math.isfinite, plot.data["edges"]))


def test_whole_numbers_and_booleans_get_a_bar_each():
    assert plots.distribution(np.array([2, 2, 5, 3])).data["counts"] == [2, 1, 0, 1]
    assert plots.distribution(np.array([True, False, True])).data["edges"] == [-0.5, 0.5, 1.5]


def test_bad_numbers_have_bars_and_a_caption():
    shown = words(plots.distribution([1.0, 2.0, math.nan, math.nan, math.inf, -math.inf]))
    assert "2 NaN, 1 Infinity, 1 -Infinity" in shown
    assert {"NaN", "Inf", "−Inf"} <= set(shown)


@pytest.mark.parametrize(("values", "text"), [([], "no values"), ([math.nan] * 3, "no finite value")])
def test_nothing_to_draw_is_said(values, text):
    assert text in words(plots.distribution(values))


@pytest.mark.parametrize("bins", [0, -3, 2.5, "ten", True, None, 10**9])
def test_a_number_of_bins_that_cannot_be_meant_is_refused(bins):
    with pytest.raises(SondeError, match="bins="):
        plots.distribution([1.0], bins=bins)
    with pytest.raises(SondeError, match="bins="):
        plots.histograms({"a": [1.0]}, name="weights", bins=bins)


@pytest.mark.parametrize("values", ["text", object(), [[1.0], [2.0, 3.0]], {"a": 1}, ["a"], None])
def test_what_holds_no_numbers_is_refused_with_its_name(values):
    with pytest.raises(SondeError, match="encoder cannot be drawn"):
        plots.distribution(values, name="encoder")


def test_complex_values_are_drawn_by_magnitude():
    assert plots.distribution(np.array([3 + 4j])).data["quantiles"]["0.5"] == 5.0


def test_values_that_change_later_do_not_change_the_picture():
    values = np.ones((3, 4))
    plot = plots.layer_heatmap(["a", "b", "c"], range(4), values, name="m", label="norm")
    before = plot.to_json()
    values[:] = 7.0
    assert plot.to_json() == before


# ---- gradient flow


def test_a_name_is_drawn_for_each_of_a_few_layers():
    shown = words(plots.gradient_flow(range(3), {"first": [1.0, 2.0, 3.0], "second": [0.1, 0.2, 0.1]}))
    assert {"first", "second", "step", "gradient norm"} <= set(shown)


def test_a_bad_gradient_is_marked_and_its_first_step_is_named():
    shown = words(plots.gradient_flow([10, 20, 30], {"a": [1.0, 2.0, 1.0], "b": [1.0, math.nan, math.inf]}))
    assert "1 NaN, 1 Infinity; the first at step 20 in b" in shown
    assert {"NaN", "Infinity"} <= set(shown)


def test_five_hundred_layers_are_bands_with_the_extremes_by_name():
    matrix = np.exp(-np.arange(500)[:, None] / 50) * np.ones(6)
    shown = words(plots.gradient_flow(range(6), dict(zip(BIG, matrix))))
    assert "median layer" in shown
    assert BIG[0] in shown
    assert BIG[-1] in shown
    assert BIG[250] not in shown
    assert "gradient norm (log)" in shown


def test_steps_are_put_in_order():
    assert plots.gradient_flow([3, 1, 2], [30.0, 10.0, 20.0]).data["norms"] == {"": [10.0, 20.0, 30.0]}


FEW = [{}, [], {"a": []}, {"a": [math.nan]}, {"a": [0.0, 0.0]}, {str(i): [math.nan, 1.0] for i in range(9)}]


@pytest.mark.parametrize("gradients", FEW)
def test_gradients_of_which_little_is_known_give_a_picture(gradients):
    num = len(next(iter(gradients.values()), [])) if isinstance(gradients, dict) else 0
    assert png(plots.gradient_flow(range(num), gradients))


def test_a_layer_with_fewer_values_than_steps_is_named():
    with pytest.raises(SondeError, match=r"gradients of 'b' has 1 values but there are 2 steps"):
        plots.gradient_flow([1, 2], {"a": [1.0, 2.0], "b": [1.0]})


def test_whole_gradients_instead_of_norms_are_refused():
    with pytest.raises(SondeError, match="one number per step"):
        plots.gradient_flow([1, 2], np.ones((2, 3)))


def test_a_step_that_is_not_finite_is_refused():
    with pytest.raises(SondeError, match="Steps must be finite"):
        plots.gradient_flow([1, math.nan], [1.0, 2.0])


# ---- heat maps


def test_a_heat_map_of_three_layers_names_them_all():
    shown = words(plots.layer_heatmap(["a", "b", "c"], [0, 10], np.ones((3, 2)), name="norms", label="norm", unit="V"))
    assert {"a", "b", "c", "norm [V]", "step", "norms"} <= set(shown)


def test_a_heat_map_of_five_hundred_layers_names_their_modules():
    shown = words(plots.layer_heatmap(BIG, range(20), RNG.random((500, 20)), name="norms", label="norm"))
    assert sum(text.startswith("encoder.layer.") for text in shown) == 50
    assert "encoder.layer.7" in shown


def test_one_bad_cell_of_five_hundred_layers_is_said_and_marked_beside_its_row():
    matrix = RNG.random((500, 3000))
    matrix[123, 1500] = math.nan
    plot = plots.layer_heatmap(BIG, range(3000), matrix, name="norms", label="norm")
    assert f"1 NaN in {BIG[123]}" in words(plot)
    marks = [line for line in plot.figure.axes[0].lines if line.get_marker() == "<"]
    assert [line.get_ydata().tolist() for line in marks] == [[123]]


def test_a_bad_cell_survives_when_neighbours_share_a_place():
    from sonde.render.plots.arrays_to_plot import coarse

    matrix = np.zeros((4000, 1))
    matrix[1234], matrix[2000], matrix[3000], matrix[3500] = math.nan, math.inf, -math.inf, 9.0
    cells = coarse(matrix, 10, 10)
    assert cells.shape == (10, 1)
    assert np.isnan(cells).sum() == 1
    assert [np.sum(cells == value) for value in (math.inf, -math.inf, 9.0)] == [1, 1, 1]


@pytest.mark.parametrize("matrix", [[], np.zeros((0, 5)), np.full((2, 2), np.nan), [[math.inf]], 3.0, [1.0, 2.0], [[True, False]]])
def test_matrices_of_which_little_is_known_give_a_picture(matrix):
    assert png(plots.heatmap(matrix, name="activations", x_label="position", y_label="unit"))


def test_layers_without_any_step_give_a_picture():
    assert "no values" in words(plots.layer_heatmap(["a", "b"], [], np.zeros((2, 0)), name="m", label="norm"))


def test_names_and_rows_must_agree():
    with pytest.raises(SondeError, match="2 names but 3 rows"):
        plots.layer_heatmap(["a", "b"], [1], np.ones((3, 1)), name="m", label="norm")


def test_three_dimensions_are_refused_with_advice():
    with pytest.raises(SondeError, match=r"(?s)\(2, 3, 4\).*values\[0\]"):
        plots.heatmap(np.ones((2, 3, 4)), name="m", x_label="x", y_label="y")


@pytest.mark.parametrize(
    ("shape", "units", "result"),
    [((5,), None, (5, 1)), ((4, 7, 3), None, (3, 28)), ((2, 6, 5, 5), None, (6, 50)), ((2, 6, 5), 1, (6, 10))],
)
def test_activations_of_any_shape_become_units_by_positions(shape, units, result):
    assert plots.units_by_positions(np.ones(shape), units).shape == result


def test_units_by_positions_keeps_each_unit_in_its_row():
    values = np.arange(24.0).reshape(2, 3, 2, 2)
    assert plots.units_by_positions(values)[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


# ---- many distributions


@pytest.mark.parametrize("num", [0, 1, 3, 24, 25, 500])
def test_from_none_to_five_hundred_distributions_there_is_a_picture(num):
    plot = plots.histograms({name: RNG.normal(size=50) for name in BIG[:num]}, name="weights")
    assert png(plot)
    assert len(plot.data["distributions"]) == num


@pytest.mark.parametrize("num", [25, 35, 96])
def test_each_of_35_parameters_has_a_histogram_with_its_name(num):
    shown = words(plot := plots.histograms({name: RNG.normal(size=200) for name in BIG[:num]}, name="weights"))
    assert set(BIG[:num]) <= set(shown)
    assert sum(bool(axes.patches) for axes in plot.figure.axes) == num


def test_a_histogram_of_few_values_has_few_bins():
    plot = plots.histograms({"bias": RNG.normal(size=32), "weight": RNG.normal(size=1024)}, name="weights")
    assert [len(each["counts"]) for each in plot.data["distributions"].values()] == [8, 64]


def test_quantiles_are_those_of_numpy_and_of_the_tensor_inspector():
    values = RNG.normal(size=37)
    quantiles = plots.distribution(values).data["quantiles"]
    assert list(quantiles.values()) == pytest.approx(np.quantile(values, [float(share) for share in quantiles]).tolist())
    huge = plots.distribution([-1.7e308, 1.7e308]).data["quantiles"]
    assert all(map(math.isfinite, huge.values()))


def test_masked_elements_are_not_drawn_as_numbers():
    masked = np.ma.masked_array([1.0, 2.0, 1e9], mask=[0, 0, 1])
    for draw in (lambda: plots.distribution(masked), lambda: plots.histograms({"a": masked}, name="w")):
        with pytest.raises(SondeError, match=r"1 of 3 elements are masked"):
            draw()
    assert plots.distribution(masked.compressed()).data["num_values"] == 2


def test_a_square_matrix_is_drawn_as_it_is():
    matrix = np.arange(9.0).reshape(3, 3)
    data = plots.activation_heatmap(matrix, name="attention").data
    assert (data["values"], data["x_label"], data["y_label"]) == (matrix.tolist(), "column", "row")


def test_attention_of_a_batch_is_one_map_per_head():
    weights = np.exp(RNG.normal(size=(2, 4, 6, 6)))
    weights /= weights.sum(-1, keepdims=True)
    plot = plots.activation_heatmap(weights, name="attention")
    assert plot.data["maps"]["[1, 3]"] == weights[1, 3].tolist()
    assert len(plot.data["maps"]) == 8
    assert "[1, 3]" in words(plot)
    assert len(plots.activation_heatmap(weights[0], name="one sample").data["maps"]) == 4
    assert plots.activation_heatmap(RNG.normal(size=(4, 6, 6)), name="sequences").data["kind"] == "heatmap"
    assert plots.activation_heatmap(weights, name="units", units=1).data["kind"] == "heatmap"
    assert plots.activation_heatmap(np.ones((2, 3, 4, 5)), name="not square").data["kind"] == "heatmap"


def test_a_map_with_nan_is_drawn_among_more_maps_than_fit():
    maps = RNG.normal(size=(4, 32, 5, 5))
    maps[3, 7, 2, 2] = math.nan
    plot = plots.activation_heatmap(maps, name="features")
    assert len(plot.data["maps"]) == 16
    assert "[3, 7]" in plot.data["maps"]
    assert "1 NaN in 1 of 128 maps" in words(plot)


@pytest.mark.parametrize("num", [100, 500])
def test_a_picture_fills_its_paper(num):
    plain = [plots.histograms({name: RNG.normal(size=9) for name in BIG[:num]}, name="weights")]
    plain.append(plots.layer_heatmap(BIG[:num], range(9), RNG.random((num, 9)), name="norms", label="norm"))
    for plot in plain:
        plot.figure.canvas.draw()
        place = plot.figure.axes[0].get_position()
        assert place.y0 < 0.12
        assert place.height > 0.75


def test_a_layer_with_a_bad_weight_is_named_among_five_hundred():
    weights = {name: RNG.normal(size=50) for name in BIG}
    weights[BIG[77]][3] = math.nan
    assert f"1 NaN in {BIG[77]}" in words(plots.histograms(weights, name="weights"))


def test_layers_that_are_empty_or_all_nan_are_drawn_as_such():
    shown = words(plots.histograms({"empty": [], "broken": [math.nan] * 4, "good": [1.0, 2.0]}, name="weights"))
    assert {"no values", "4 NaN", "empty", "broken", "good"} <= set(shown)


# ---- names


@pytest.mark.parametrize("name", ["$x^2$", "$\\frac{", "编码器", "a\x1b[31m\n\u202eb", "<b>&", "x" * 5000, "\ud800", ""])
def test_any_name_can_be_drawn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plot in (
            plots.distribution([1.0], name=name, unit=name),
            plots.gradient_flow([1], {name: [1.0], "b": [1.0]}, name=name),
            plots.layer_heatmap([name], [1], [[1.0]], name=name, label=name, unit=name),
            plots.heatmap([[1.0]], name=name, x_label=name, y_label=name, label=name),
            plots.histograms({name: [1.0]}, name=name),
        ):
            assert png(plot)
            assert plot.render("svg")


def test_dollar_signs_are_drawn_as_they_are():
    assert "loss in $ and $" in words(plots.distribution([1.0], name="loss in $ and $"))


# ---- matplotlib is left alone


def test_the_settings_of_matplotlib_are_neither_used_nor_changed():
    before = plots.distribution([1.0, 2.0]).render("svg")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "lines.linewidth": 9, "svg.hashsalt": "mine"}):
        mine = dict(matplotlib.rcParams)
        assert plots.distribution([1.0, 2.0]).render("svg") == before
        assert dict(matplotlib.rcParams) == mine


def test_pyplot_is_never_loaded(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys\nfrom sonde.render import plots\nassert 'matplotlib' not in sys.modules\n"
        "plots.distribution([1.0]).save('x.png')\nassert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_without_matplotlib_the_letter_says_what_to_install(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = plots.distribution([1.0])
    with pytest.raises(SondeError, match=r"pip install 'sonde\[plot\]'"):
        plot.save(tmp_path / "x.png")
    assert json.loads(plot.save(tmp_path / "x.json").read_text())["counts"]  # numbers need no matplotlib


def test_a_picture_can_be_read_by_other_programs():
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(plots.distribution([1.0]).render("png", dpi=50)))
    assert image.size == (320, 180)


def test_parameters_of_equal_blocks_have_different_titles_in_full():
    names = [f"transformer.layers.{i}.self_attention.in_proj_weight" for i in range(12)]
    shown = words(plots.histograms({name: RNG.normal(size=50) for name in names}, name="weights", kind="parameter"))
    assert any(text.startswith("12 parameters; ") for text in shown)
    assert {text.replace("\n", "") for text in shown} >= set(names)


def test_one_column_of_a_heat_map_has_one_tick():
    axes = plots.heatmap(RNG.normal(size=(7, 1)), name="a", x_label="position", y_label="unit").figure.axes[0]
    assert axes.get_xticks().tolist() == [0]


def test_attention_weights_with_a_nan_are_still_one_map_per_head():
    weights = RNG.dirichlet(np.ones(6), size=(4, 6))
    weights[1, 2] = math.nan
    assert plots.activation_heatmap(weights, name="a").data["kind"] == "square_maps"
    assert plots.activation_heatmap(np.full((4, 6, 6), math.nan), name="a").data["kind"] == "heatmap"


def test_the_legend_of_a_panel_does_not_cover_the_mark_of_a_nan():
    values = np.random.default_rng(38).uniform(3, 8, 40)  # matplotlib's best place for a legend would be above the mark
    values[20] = math.inf
    panel = figure_with_panels.Panel("norms", "L2", {"norm": (range(40), values)}, [20], "anomaly")
    figure = figure_with_panels.panels("a", [panel] * 4).figure
    figure.canvas.draw()
    axes = figure.axes[2]
    mark = next(line for line in axes.lines if line.get_label() == "Infinity")
    assert not axes.get_legend().get_window_extent().contains(*axes.transData.transform(mark.get_xydata()[0]))


def test_a_panel_over_three_steps_has_ticks_at_whole_numbers():
    panel = figure_with_panels.Panel("norms", "L2", {"norm": ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])})
    axes = figure_with_panels.panels("a", [panel]).figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]
