"""Where a loss is going: the forecast is held against curves whose future is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sonde.diagnostics.convergence import convergence


def noisy(curve: np.ndarray, seed: int, noise: float = 0.1) -> np.ndarray:
    return np.asarray(curve * np.exp(noise * np.random.default_rng(seed).standard_normal(len(curve))))


def exponential(t: np.ndarray, seed: int) -> np.ndarray:
    return np.asarray(0.3 + 2 * np.exp(-t / (20 + 15 * (seed % 5))))


def power(t: np.ndarray, seed: int) -> np.ndarray:
    return np.asarray(0.1 + 2.3 * (1 + t / 3) ** -(0.2 + 0.1 * (seed % 5)))


def flat(t: np.ndarray, seed: int) -> np.ndarray:
    return np.full_like(t, 2.3)


@pytest.mark.parametrize("curve", [exponential, power, flat])
def test_the_level_to_come_lies_in_the_interval_about_nine_times_in_ten(curve):
    inside = []
    for seed in range(30):
        t = np.arange(181, dtype=float)
        truth = curve(t, seed)
        found = convergence(t[:120], noisy(truth, seed)[:120])
        assert found is not None
        assert found.forecast is not None
        inside.append(found.forecast.low <= truth[found.forecast.step] <= found.forecast.high)
    assert np.mean(inside) >= 0.8


def test_an_interval_is_narrow_where_the_past_was_easily_forecast():
    t = np.arange(200, dtype=float)
    found = convergence(t, noisy(flat(t, 0), 1, noise=0.01))
    assert found is not None
    assert found.forecast is not None
    assert found.forecast.high - found.forecast.low < 0.1 * found.forecast.loss


def test_half_of_the_rest_takes_as_long_as_the_decay_says():
    t = np.arange(300, dtype=float)
    found = convergence(t, noisy(0.5 + 2 * np.exp(-t / 80), 3, noise=0.02))
    assert found is not None
    assert found.half_life_steps == pytest.approx(80 * math.log(2), rel=0.3)
    assert found.end == pytest.approx(0.5, abs=0.1)
    assert found.per_step < 0


def test_a_straight_line_has_no_end_in_sight():
    t = np.arange(200, dtype=float)
    found = convergence(t, 5 - 0.01 * t)
    assert found is not None
    assert found.end is None
    assert found.half_life_steps is None
    assert found.per_step == pytest.approx(-0.01, rel=0.05)


def test_the_forecast_follows_the_steps_and_not_their_number():
    t = np.arange(0, 1200, 10, dtype=float)
    found = convergence(t, noisy(3 * np.exp(-t / 500), 0), ahead=100)
    assert found is not None
    assert found.forecast is not None
    assert found.forecast.step == 1290


def test_a_loss_that_was_never_below_zero_is_not_forecast_below_zero():
    t = np.arange(100, dtype=float)
    found = convergence(t, 1.0 - 0.0099 * t)
    assert found is not None
    assert found.forecast is not None
    assert found.forecast.low >= 0


def test_few_losses_give_no_forecast():
    t = np.arange(10, dtype=float)
    assert convergence(t, 2 - 0.1 * t) is None


def test_farther_than_ten_times_the_past_nothing_is_forecast():
    t = np.arange(60, dtype=float)
    found = convergence(t, 2 * np.exp(-t / 20), ahead=10_000)
    assert found is not None
    assert found.forecast is None
    assert "10000" in found.reason
