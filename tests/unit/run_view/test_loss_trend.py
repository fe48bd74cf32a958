"""The question behind every threshold: is the training really failing?"""

from __future__ import annotations

from math import log, nan

import numpy as np
import pytest

from sonde.events import Event, Step
from sonde.run_view.loss_trend import BUCKETS, BucketedHistory, LossTrend
from synthetic_steps import falling, noise, opening, stuck, training, view_of


def after(*args, **kwargs) -> LossTrend:
    with view_of(training(*args, **kwargs)) as view:
        return view.loss_trend


@pytest.mark.parametrize("num", [1, 5, BUCKETS, BUCKETS + 1, 1000, 12345])
def test_a_history_of_any_length_keeps_its_mean_in_bounded_space(num):
    history = BucketedHistory(np.arange(num, dtype=np.float64))
    assert len(history) <= BUCKETS
    whole = history.between(0, 1)
    assert whole.num == num
    assert whole.mean == pytest.approx((num - 1) / 2)
    assert whole.squares / num == pytest.approx((num * num - 1) / 12)


def test_a_loss_that_falls_is_not_failing():
    trend = after()
    assert trend.has_fallen
    assert not trend.failing
    assert not trend.stuck


def test_a_loss_that_falls_slowly_within_its_noise_is_a_fall():
    assert after(1000, loss=lambda s: 2.3 - s * 5e-5 + 0.05 * noise(s)).has_fallen


def test_a_loss_that_does_not_move_is_failing_after_enough_steps_and_not_before():
    assert not after(20, loss=stuck).failing
    assert "did not fall" in after(100, loss=stuck).failing


def test_a_loss_that_doubles_is_failing():
    assert "rose" in after(loss=lambda s: 2.3 * 1.05**s).failing


def test_a_loss_that_stays_nan_is_failing_and_one_nan_is_not():
    assert "not finite from step 30" in after(loss=lambda s: falling(s) if s < 30 else nan).failing
    assert not after(loss=lambda s: nan if s == 30 else falling(s)).failing


def test_a_run_that_stops_at_its_first_nan_is_failing():
    assert after(4, loss=lambda s: 2.3 if s < 3 else nan).failing


def test_a_loss_that_only_fits_its_bias_is_stuck_but_not_failing():
    trend = after(200, loss=lambda s: 5.0 if s < 5 else 1.0 + 0.01 * noise(s))
    assert not trend.failing
    assert "stays where it was" in trend.stuck


@pytest.mark.parametrize("loss", [lambda s: -3.0, lambda s: noise(s), lambda s: 0.0])
def test_losses_that_are_not_positive_are_never_failing(loss):
    assert not after(loss=loss).stuck


def test_a_second_loss_that_takes_over_is_no_nan_of_the_first():
    """Pre-training and fine-tuning call backward on different lines: the first series is NaN from then on, with no event of a bad loss."""
    steps = training(loss=lambda s: falling(s) if s < 50 else nan, scalars=lambda s: {"loss:2": 0.2 if s >= 50 else nan})
    with view_of([Step(step.number, 0, step.scalars, {}, (), {}) for step in steps]) as view:
        assert view.loss_trend.num_nonfinite == 0
        assert view.loss_trend.num_losses == 100


def test_several_losses_are_never_failing_by_their_level():
    second = Event("source", 0, {"call": "backward", "line": "gan.py:9", "text": "", "series": "loss:2"})
    assert not after(loss=stuck, start=[*opening(), second]).stuck


@pytest.mark.parametrize(
    ("shape", "loss", "classes"),
    [
        ([32, 10], log(10), 10),
        ([8, 20, 50], log(50), 50),
        ([4, 3, 16, 16], log(3), 3),
        ([32, 1], log(2), 2),
        ([32], log(2), 2),
        ([32, 10], 1.5, 0),
        ([32, 10], log(10) * 1.04, 10),
    ],
)
def test_chance_is_known_from_the_width_of_the_output(shape, loss, classes):
    start = [Event("output", 0, {"model": "model", "shape": shape, "dtype": "float32"})]
    assert after(start=start, loss=lambda s: loss).chance == classes


def test_a_shape_that_makes_no_sense_is_passed_over():
    assert after(start=[Event("output", 0, {"shape": "?"})]).class_counts == set()
