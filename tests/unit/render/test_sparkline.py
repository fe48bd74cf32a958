"""A curve in a line of text, with its bad numbers in it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.render.terminal.sparkline import ASCII_BLOCKS, ASCII_MARKS, BLOCKS, MARKS, is_log, sparkline

NAN, INF = math.nan, math.inf


def test_a_falling_curve_falls():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"


def test_a_constant_curve_is_a_line_in_the_middle():
    assert sparkline([3.0, 3.0, 3.0]) == "▄▄▄"


def test_nan_and_both_infinities_are_drawn_each_in_its_own_way():
    assert sparkline([1, NAN, INF, -INF, 2]) == "▁✗↑↓█"


def test_a_single_nan_among_ten_thousand_values_is_still_seen():
    values = [1.0] * 10_000
    values[7_123] = NAN
    assert sparkline(values, 40).count("✗") == 1


def test_a_single_spike_among_ten_thousand_values_is_still_seen():
    values = [1.0] * 10_000
    values[7_123] = 50.0
    assert sparkline(values, 40).count("█") == 1


def test_a_curve_over_many_decades_is_drawn_on_a_logarithmic_axis():
    decades = [10.0**power for power in range(8)]
    assert is_log(decades)
    assert sparkline(decades) == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize("values", [[1, 2, 3], [-1, 1e9], [0.0, 1e9], [NAN], [], [1.0, INF]])
def test_other_curves_are_linear(values):
    assert not is_log(values)


def test_nothing_to_draw_is_drawn_as_nothing():
    assert sparkline([]) == ""


@given(st.lists(st.floats(), max_size=300), st.integers(1, 80), st.booleans())
def test_any_values_give_at_most_width_characters_of_the_alphabet(values, width, ascii_only):
    drawn = sparkline(values, width, ascii_only=ascii_only)
    assert len(drawn) == min(len(values), width)
    blocks, marks = (ASCII_BLOCKS, ASCII_MARKS) if ascii_only else (BLOCKS, MARKS)
    assert set(drawn) <= set(blocks) | set(marks.values())
    assert not ascii_only or drawn.isascii()
    bad = any(not math.isfinite(value) for value in values)
    assert bad == bool(set(drawn) & set(marks.values()))
