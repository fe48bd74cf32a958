"""Drawings in text: exact where they are small, never wider than they may be, bad numbers always in them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sonde.errors import SondeError
from sonde.render.terminal.text_plots import PlotArea, heatmap, histogram, layer_table, line_plot

NAN, INF = math.nan, math.inf
FLOATS = st.lists(st.floats(), min_size=1, max_size=60)
PAPERS = st.builds(PlotArea, width=st.integers(20, 130), height=st.integers(6, 40), unicode=st.booleans())
NAMES = ["encoder.layers.0", "编码器", "x\x1b[2Jy", "\u202eabc", "a" * 300]


def fits(text, paper):
    assert all(cell_len(line) <= paper.width for line in text.split("\n"))
    assert "\x1b" not in text
    assert paper.unicode or text.isascii()


# ---- histogram


def test_a_histogram_is_drawn_exactly():
    assert histogram([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 3.0], 2, PlotArea(20, 10)).split("\n") == [
        "1.0 │█████████████ 4",
        "2.0 │█████████▊ 3",
        "7 values, 1 to 3",
    ]


def test_the_same_histogram_in_ascii():
    assert histogram([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 3.0], 2, PlotArea(20, 10, unicode=False)).split("\n") == [
        "1.0 |############# 4",
        "2.0 |########## 3",
        "7 values, 1 to 3",
    ]


def test_bad_numbers_have_rows_and_a_line_of_their_own():
    text = histogram([1.0, 2.0, NAN, NAN, INF, -INF], 2, PlotArea(40, 12))
    assert " NaN │✗✗✗" in text
    assert " Inf │↑" in text
    assert "-Inf │↓" in text
    assert text.endswith("✗ 2 NaN  ↑ 1 Infinity  ↓ 1 -Infinity")


def test_a_single_value_among_a_million_still_has_a_bar():
    text = histogram(np.r_[np.zeros(1_000_000), 5.0], 3, PlotArea(60, 12))
    assert "│▏ 1" in text or "bars logarithmic" in text
    assert text.split("\n")[2].rstrip().endswith(" 1")


def test_more_bins_than_rows_are_made_fewer_and_it_is_said():
    text = histogram(np.random.default_rng(0).normal(size=500), 64, PlotArea(80, 12))
    assert len(text.split("\n")) == 12
    assert text.endswith("10 bins: 64 have no room in 12 rows")


@given(FLOATS, st.integers(1, 70), PAPERS)
def test_any_values_give_a_histogram_that_fits(values, bins, paper):
    text = histogram(values, bins, paper)
    fits(text, paper)
    assert ("NaN" in text) == any(map(math.isnan, values))


def test_nothing_but_nan_is_a_histogram_of_nan():
    assert histogram([NAN, NAN], 4, PlotArea(30, 10)).startswith("NaN │✗")


def test_no_values_are_said():
    assert histogram([], 4, PlotArea()) == heatmap([], None, PlotArea()) == "no values"
    assert line_plot([], [], "loss", PlotArea()) == "loss\nno values"


@pytest.mark.parametrize("bins", [0, -1])
def test_a_number_of_bins_that_cannot_be_meant_is_refused(bins):
    with pytest.raises(SondeError, match=f"bins={bins}"):
        histogram([1.0], bins, PlotArea())


# ---- curves


def test_a_curve_is_drawn_exactly():
    assert line_plot([0, 10], [0.0, 1.0], "up", PlotArea(20, 8)).split("\n") == [
        "up",
        "1.0┤           ⣀⠤⠔⠒⠉",
        "0.5┤     ⣀⡠⠤⠒⠊⠉",
        "0.0┤⣀⠤⠔⠒⠉",
        "   └────────────────",
        "    0             10",
    ]


def test_a_bad_value_breaks_the_curve_and_is_marked_where_it_is():
    assert line_plot(range(5), [1.0, 1.0, NAN, 1.0, 1.0], "", PlotArea(24, 8)).split("\n") == [
        " │          ✗",
        "1┤⠤⠤⠤⠤⠤⠤          ⠤⠤⠤⠤⠤⠤",
        " │",
        " └──────────────────────",
        "  0                    4",
        "✗ 1 NaN",
    ]


def test_infinities_stand_at_the_edge_they_went_over():
    lines = line_plot(range(5), [1.0, INF, 2.0, -INF, 1.0], "", PlotArea(40, 10)).split("\n")
    rows = [line for line in lines if "│" in line or "┤" in line]
    assert "↑" in rows[0]
    assert "↓" in rows[-1]


def test_where_two_bad_values_share_a_place_the_first_is_seen():
    values = [1.0] * 1000
    values[500:600] = [INF] + [NAN] * 99
    assert "↑✗" in line_plot(range(1000), values, "", PlotArea(40, 10))


def test_a_curve_over_decades_has_a_logarithmic_axis_and_says_so():
    text = line_plot(range(5), [1e-8, 1e-4, 1.0, 1e4, 1e8], "", PlotArea(60, 16))
    assert "vertical axis: log" in text
    assert "1e-8┤" in text


def test_one_spike_among_a_hundred_thousand_values_is_seen():
    values = np.zeros(100_000)
    values[77_777] = 1.0
    highest = line_plot(range(100_000), values, "", PlotArea(60, 12)).split("\n")[0]
    assert len(highest.removeprefix("1.0┤").strip()) == 1


@given(FLOATS, PAPERS, st.sampled_from(["", *NAMES]))
def test_any_curve_fits_and_shows_its_bad_values(values, paper, title):
    text = line_plot(range(len(values)), values, title, paper)
    fits(text, paper)
    assert len(text.split("\n")) <= max(paper.height, 9) + 1
    mark = "✗" if paper.unicode else "N"
    assert not any(map(math.isnan, values)) or mark in text


def test_ends_of_the_axis_that_have_no_room_are_left_out_rather_than_cut():
    lines = line_plot([-1.25e300, 1.25e-300], [1e-300, 1.0], "", PlotArea(20, 8)).split("\n")
    assert lines[4].strip() == "-1.25e+300"


def test_x_and_y_must_be_equally_long():
    with pytest.raises(SondeError, match="y has 2 values but there are 3 steps"):
        line_plot([1, 2, 3], [1.0, 2.0], "", PlotArea())


# ---- heat maps and tables


def test_a_heat_map_is_drawn_exactly():
    assert heatmap([[0.0, 1.0], [2.0, NAN]], ["a", "bb"], PlotArea(14, 8)).split("\n") == [
        "a  ·····▒▒▒▒▒",
        "bb █████✗✗✗✗✗",
        "· 0 … █ 2",
        "✗ 1 NaN",
    ]


def test_five_hundred_layers_are_drawn_in_the_rows_that_there_are():
    names = [f"encoder.layer.{i // 10}.linear{i % 10}" for i in range(500)]
    matrix = np.ones((500, 300))
    matrix[250, 150] = NAN
    text = heatmap(matrix, names, PlotArea(80, 24))
    assert len(text.split("\n")) <= 24
    assert text.count("✗") == 2  # the cell, and the line that explains it
    assert "encoder.layer.0" in text


@given(
    st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(st.floats(), min_size=n, max_size=n), min_size=1, max_size=12)), PAPERS
)
def test_any_matrix_fits(matrix, paper):
    fits(heatmap(matrix, (NAMES * 3)[: len(matrix)], paper), paper)


def test_names_and_rows_must_agree():
    with pytest.raises(SondeError, match="1 names but 2 rows"):
        heatmap([[1.0], [2.0]], ["a"], PlotArea())


def test_a_table_is_drawn_exactly():
    rows = {"encoder": {"mean": 0.12345, "nan": 0}, "head": {"mean": NAN}}
    assert layer_table(rows, PlotArea(40)).split("\n") == [
        "          mean  nan",
        "───────────────────",
        "encoder  0.123    0",
        "head       NaN",
    ]


def test_columns_without_room_are_named():
    rows = {"encoder.layers.0.attention": {"mean": 1.0, "std": 2.0, "min": 3.0, "max": 4.0}}
    text = layer_table(rows, PlotArea(28))
    assert "no room for: " in text
    fits(text, PlotArea(28))


@given(st.dictionaries(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(["mean", "std", "编"]), st.floats())), PAPERS)
def test_any_table_fits(rows, paper):
    fits(layer_table(rows, paper), paper)


def test_only_what_is_not_finite_is_red():
    paper = PlotArea(40, 12, color=True)
    text = line_plot(range(3), [1.0, NAN, 2.0], "loss", paper)
    assert "\x1b[31m✗\x1b[0m" in text
    assert text.count("\x1b[31m") == text.count("\x1b[0m") == 2
    assert "\x1b" not in line_plot(range(3), [1.0, 1.5, 2.0], "loss", paper)
