"""What is a spike, and what is only noise."""

import random
from math import exp, inf, log, sin

import pytest

from sonde.spike_detection import CALM, ENOUGH, WINDOW, LogNormBound, LossBound


def leaps(recent, values):
    return [place for place, value in enumerate(values) if recent.update(value) is not None]


def falling(num, seed=0, noise=0.1):
    chance = random.Random(seed)
    return [0.2 + 2.1 * exp(-place / 40) + noise * chance.random() for place in range(num)]


def test_a_loss_of_many_times_the_usual_is_a_spike_where_it_is():
    values = falling(200)
    values[120] = 9.0
    assert leaps(LossBound(), values) == [120]


def test_a_spike_tells_its_value_and_the_usual_range():
    recent = LossBound()
    for value in falling(100, noise=0.0):
        recent.update(value)
    found = recent.update(50.0)
    assert found is not None
    assert found.value == 50.0
    assert found.low < found.usual < found.high < found.bound < 50.0


def test_nothing_is_a_spike_before_the_usual_is_known():
    assert leaps(LossBound(), [1.0, 900.0, 1.0, 1e9] * (ENOUGH // 4 - 1)) == []
    assert LossBound().bound == inf


def test_a_spike_that_lasts_is_one_spike():
    values = falling(200)
    values[120:128] = [9.0] * 8
    assert leaps(LossBound(), values) == [120]


def test_a_spike_does_not_hide_the_next_one():
    values = falling(300)
    for place in (100, 130, 160):
        values[place] = 50.0
    assert leaps(LossBound(), values) == [100, 130, 160]


def test_a_level_that_stays_becomes_the_usual():
    values = [1.0 + 0.01 * (place % 7) for place in range(100)] + [60.0 + 0.5 * (place % 7) for place in range(400)]
    assert leaps(LossBound(), values) == [100]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([chance.expovariate(1.0) for chance in [random.Random(1)] for _ in range(5000)], id="exponential"),
        pytest.param([chance.gauss(0.0, 1.0) for chance in [random.Random(2)] for _ in range(5000)], id="changes sign"),
        pytest.param([exp(chance.gauss(-3.0, 0.7)) for chance in [random.Random(3)] for _ in range(5000)], id="lognormal"),
        pytest.param([2.0 + 1e-6 * (place % 3) + (1e-3 if place % 90 == 80 else 0) for place in range(2000)], id="steady"),
        pytest.param([max(1e-5, exp(-place / 50)) * (1 + 0.5 * sin(place)) for place in range(3000)], id="near zero"),
        pytest.param([0.3 if place % 16 else 2.0 for place in range(2000)], id="another loss every sixteenth step"),
        pytest.param([-3.0 + 0.5 * sin(place) + place * 1e-4 for place in range(3000)], id="negative"),
    ],
)
def test_noise_is_no_spike(values):
    assert leaps(LossBound(), values) == []


def test_a_hard_sample_near_zero_loss_is_no_spike_but_losing_a_quarter_of_what_was_learnt_is():
    values = [2.3] * 5 + [2.3 * exp(-place / 10) + 1e-4 for place in range(200)]
    assert leaps(LossBound(), [*values, 0.3]) == []
    assert leaps(LossBound(), [*values, 0.7]) == [205]


def test_gradient_norms_are_judged_in_logarithms():
    chance = random.Random(5)
    usual = [log(0.4) + chance.gauss(0.0, 0.4) for _ in range(2000)]
    assert leaps(LogNormBound(), usual) == []
    assert leaps(LogNormBound(), [*usual, log(300.0)]) == [2000]


def test_two_spikes_close_to_each_other_are_one():
    values = falling(200)
    values[120] = values[120 + CALM - 1] = 30.0
    assert leaps(LossBound(), values) == [120]


def test_what_is_kept_is_bounded():
    recent = LossBound()
    for value in falling(10_000):
        recent.update(value)
    assert len(recent._values) == WINDOW
