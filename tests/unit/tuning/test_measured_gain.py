"""Separates gains from noise, and trainings with the same losses from others."""

import math
import random

import pytest

from sonde.tuning.measured_gain import compare_losses, gain_of, noise_of, ratios
from sonde.tuning.trial_messages import Trial, read_trial


def test_a_change_is_compared_with_the_baselines_right_beside_it():
    # The machine halves its speed between the two trials; the change is worth a factor of 2 throughout.
    sequence = [("", 100.0), ("fused", 200.0), ("", 100.0), ("", 50.0), ("fused", 100.0), ("", 50.0)]
    assert ratios(sequence, "fused") == [2.0, 2.0]


def test_the_last_trial_has_a_baseline_on_one_side_only():
    assert ratios([("", 10.0), ("fused", 15.0)], "fused") == [1.5]


def test_noise_is_what_the_unchanged_script_differs_by_from_itself():
    assert noise_of([100.0, 110.0, 110.0, 99.0]) == pytest.approx(0.1)
    assert noise_of([100.0]) == 0.0


def test_faster_every_time_and_by_more_than_the_noise_is_faster():
    assert gain_of([1.4, 1.5, 1.6], noise=0.05).verdict == "faster"


@pytest.mark.parametrize(
    ("ratio", "noise"),
    [([1.2, 0.98, 1.3], 0.01), ([1.1, 1.12, 1.11], 0.2), ([1.01, 1.02, 1.02], 0.0), ([1.3], 0.15)],
    ids=["once not faster", "less than the noise", "hardly worth it", "once, on a noisy machine"],
)
def test_what_may_be_luck_is_no_gain(ratio, noise):
    assert gain_of(ratio, noise).verdict == "noise"


def test_what_costs_time_is_called_slower():
    assert gain_of([0.5, 0.6], noise=0.02).verdict == "slower"


def test_changes_that_do_nothing_are_seldom_sold_as_a_gain():
    """A thousand changes that do nothing, on a machine that differs by 8 % from run to run."""
    dice = random.Random(0)
    num_sold = 0
    for _ in range(1000):
        sequence = [("" if number % 2 == 0 else "idle", dice.gauss(100, 8)) for number in range(7)]
        noise = noise_of([speed for name, speed in sequence if name == ""])
        num_sold += gain_of(ratios(sequence, "idle"), noise).verdict == "faster"
    assert num_sold < 35


def test_a_real_gain_is_found_on_the_same_machine():
    dice = random.Random(0)
    num_found = 0
    for _ in range(200):
        sequence = [("", dice.gauss(100, 8)) if number % 2 == 0 else ("fused", dice.gauss(160, 12)) for number in range(7)]
        noise = noise_of([speed for name, speed in sequence if name == ""])
        num_found += gain_of(ratios(sequence, "fused"), noise).verdict == "faster"
    assert num_found > 180


def test_equal_losses_are_the_same_training():
    assert compare_losses([1.0, 0.5, math.nan], [1.0, 0.5, math.nan]).kind == "same"


def test_losses_that_differ_by_rounding_are_close():
    check = compare_losses([1.0, 0.5, 0.25], [1.0, 0.5001, 0.2504])
    assert check.kind == "close"
    assert check.difference == pytest.approx(0.0008)


def test_losses_that_part_say_at_which_step():
    check = compare_losses([1.0, 0.5, 0.25], [1.0, 0.6, 0.9])
    assert (check.kind, check.step) == ("departs", 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["NaN", "infinity"])
def test_a_loss_that_is_no_number_departs_from_one_that_is(bad):
    assert compare_losses([1.0, 1.0], [1.0, bad]).kind == "departs"
    assert compare_losses([1.0, bad], [1.0, 1.0]).kind == "departs"


def test_a_script_that_never_repeats_itself_has_nothing_to_compare_with():
    assert compare_losses([1.0, 0.5], [0.9, 0.6], own_difference=0.3).kind == "unknown"
    assert compare_losses([], []).kind == "unknown"


def test_a_trial_of_few_steps_is_not_believed():
    document = {"outcome": "ended", "num_steps": 3, "seconds": 1.0, "losses": [1.0], "survey": None}
    assert not read_trial(document).is_usable
    assert Trial("measured", num_steps=10, seconds=1.0).is_usable
