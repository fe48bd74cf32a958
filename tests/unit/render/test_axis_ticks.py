"""An axis puts every finite float between 0 and 1, in order, and names round numbers."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.render.axis_ticks import curve_axis, even_labels, linear_axis, short, spread_axis

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("axis_of", [curve_axis, spread_axis])
@given(values=st.lists(FINITE, min_size=1, max_size=50))
def test_any_finite_values_keep_their_order_inside_the_axis(axis_of, values):
    given_values = np.sort(np.array(values))
    places = axis_of(given_values).place(given_values)
    assert np.all((places >= -1e-6) & (places <= 1 + 1e-6))
    assert np.all(np.diff(places) >= -1e-9)


@pytest.mark.parametrize("axis_of", [curve_axis, spread_axis])
@given(values=st.lists(FINITE, min_size=1, max_size=50), limit=st.integers(2, 12))
def test_ticks_lie_on_the_axis_and_are_not_many(axis_of, values, limit):
    ticks = axis_of(np.array(values)).ticks(limit)
    assert len(ticks) <= 2 * limit + 2
    assert all(-1e-6 <= place <= 1 + 1e-6 for place, _ in ticks)
    assert all(re.fullmatch(r"-?\d[\d.]*(e-?\d+)?", label) for _, label in ticks)


def test_a_tick_stands_where_its_number_stands():
    axis = curve_axis(np.array([1e-4, 3.0, 70.0]))
    for place, label in axis.ticks():
        assert axis.place(float(label)) == pytest.approx(place)


@pytest.mark.parametrize("values", [[0.0, 5.0], [1e-4, 80.0], [-1e20, 1e-3, 2e-3, 3e-3, 1e20]])
def test_the_value_at_a_place_is_the_value_that_was_placed(values):
    axis = spread_axis(np.array(values))
    assert axis.values(axis.place(np.array(values))) == pytest.approx(np.array(values), rel=1e-9)


def test_norms_over_two_decades_ask_for_a_logarithmic_axis_and_losses_within_one_do_not():
    assert curve_axis(np.array([0.001, 0.5])).scale == "log"
    assert curve_axis(np.array([0.5, 2.0])).scale == "linear"


def test_normal_values_are_spread_linearly_and_values_over_sixty_decades_are_not():
    normal = np.random.default_rng(0).normal(size=1000)
    assert spread_axis(normal).scale == spread_axis(np.abs(normal)).scale == "linear"
    assert spread_axis(10 ** (30 * normal)).scale == "log"
    assert spread_axis(normal * 10 ** (30 * np.abs(normal))).scale == "signed log"


def test_zeros_have_a_place_of_their_own_on_a_logarithmic_axis():
    axis = curve_axis(np.array([0.0, 1e-3, 1.0]))
    assert axis.place(np.array([0.0, 1e-3, 1.0])).tolist() == pytest.approx([0.0, 0.3 / 3.3, 1.0])
    assert axis.ticks()[0] == (0.0, "0")


def test_what_is_not_finite_has_no_place():
    assert np.isnan(linear_axis(0.0, 1.0).place(np.array([np.nan, np.inf, -np.inf]))).all()


def test_one_number_stands_in_the_middle():
    assert curve_axis(np.array([7.0])).place(7.0) == pytest.approx(0.5)
    assert curve_axis(np.array([0.0])).place(0.0) == pytest.approx(0.5)


def test_no_finite_number_gives_an_axis_all_the_same():
    assert curve_axis(np.array([np.nan])).ticks()
    assert spread_axis(np.zeros(0)).ticks()


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "0"), (0.01, "0.01"), (1000.0, "1000"), (1e-5, "1e-5"), (1e6, "1e6"), (-2e-7, "-2e-7"), (1.5e300, "1.5e300")]
)
def test_round_numbers_are_written_shortly(number, text):
    assert short(number) == text


def test_labels_of_equal_steps_have_equally_many_decimals():
    assert even_labels([-0.5, 0.0, 0.5, 1.0]) == ["-0.5", "0.0", "0.5", "1.0"]
    assert even_labels([1e-7, 2e-7]) == ["1e-7", "2e-7"]
    assert even_labels([-0.0, 2.0]) == ["0", "2"]
