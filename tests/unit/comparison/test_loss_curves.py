"""Two losses: levels at equal steps and equal time, and when one stays outside of what the other does by chance."""

import itertools
import math

import numpy as np
import pytest

from comparison_runs import falling, write_pair_run
from sonde.comparison.loss_curves import compare_losses
from sonde.run_view import RunView
from sonde.runlog.run_reader import Run


@pytest.fixture
def losses(tmp_path):
    """`losses(a, b)` compares two runs with these losses."""

    number = itertools.count()

    def compare(a, b, scalars_a=None, scalars_b=None, **rest):
        views = [
            RunView(Run(write_pair_run(tmp_path / f"{name}{next(number)}", values, observed=(), scalars=scalars, **rest)).processes[0])
            for name, values, scalars in (("a", a, scalars_a), ("b", b, scalars_b))
        ]
        return compare_losses(*views)

    return compare


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("noise", [0.005, 0.3])
def test_another_seed_of_the_same_training_stays_within_the_band(losses, seed, noise):
    (found,) = losses(falling(300, noise), falling(300, noise, seed=seed))
    assert (found.side, found.left_step) == ("same", -1)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("factor, side", [(2.0, "higher"), (0.5, "lower")])
def test_a_loss_that_leaves_the_band_for_good_is_told_from_where_on(losses, noise, factor, side):
    b = [loss * (factor if step >= 150 else 1) for step, loss in enumerate(falling(400, noise, seed=3))]
    (found,) = losses(falling(400, noise), b)
    assert found.side == side
    assert 140 <= found.left_step <= 160
    assert found.equal_step_b.value == pytest.approx(factor * found.equal_step_a.value, rel=0.2)


def test_what_comes_back_has_not_left_for_good(losses):
    b = [loss * (3 if 100 <= step < 200 else 1) for step, loss in enumerate(falling(400, seed=1))]
    assert losses(falling(400), b)[0].side == "same"


def test_the_last_window_alone_is_chance(losses):
    b = [loss * (3 if step >= 395 else 1) for step, loss in enumerate(falling(400, seed=1))]
    assert losses(falling(400), b)[0].side == "same"


def test_losses_below_zero_are_compared_by_the_range_that_they_cover(losses):
    a = (-np.array(falling(300))).tolist()
    assert losses(a, (np.array(a) - 0.02).tolist())[0].side == "same"
    assert losses(falling(300, floor=-2.0, noise=0.01), falling(300, floor=-1.0, noise=0.01))[0].side == "higher"


def test_a_loss_that_ends_in_nan_is_told_with_its_first_step(losses):
    b = [*falling(200)[:140], *[math.nan] * 60]
    (found,) = losses(falling(200), b)
    assert (found.side, found.first_bad_a, found.first_bad_b) == ("not finite", -1, 140)
    assert math.isnan(found.final_b.value)
    assert math.isfinite(found.best_b.value)


def test_a_first_run_that_ends_in_infinity_is_the_other_way_round(losses):
    (found,) = losses([*falling(100), *[math.inf] * 60], falling(160))
    assert (found.side, found.first_bad_a) == ("finite", 100)
    assert found.final_a.value == math.inf


def test_one_bad_batch_does_not_make_a_loss_not_finite(losses):
    b = [math.nan if step == 50 else loss for step, loss in enumerate(falling(200))]
    (found,) = losses(falling(200), b)
    assert (found.side, found.first_bad_b) == ("same", 50)


def test_a_step_without_a_loss_is_no_loss(losses):
    b = [math.nan if step % 2 else loss for step, loss in enumerate(falling(200))]
    (found,) = losses(falling(200), b, bad_events=False)
    assert (found.num_common, found.side, found.first_bad_b) == (100, "same", -1)


def test_runs_of_unequal_length_are_compared_at_the_last_common_step(losses):
    (found,) = losses(falling(400), falling(100))
    assert (found.equal_step_a, found.final_a.step, found.final_b.step) == (found.equal_step_b, 399, 99)
    assert found.equal_step_a.step == 99
    assert found.side == "same"


def test_the_same_time_is_another_step_where_one_run_is_slower(losses):
    (found,) = losses(falling(200, 0.0), falling(200, 0.0), {"step_ms": 10.1}, {"step_ms": 20.1})
    assert found.equal_time_s == pytest.approx(2.0)
    assert (found.equal_time_a.step, found.equal_time_b.step) == (199, 99)
    assert found.equal_time_b.value > found.equal_time_a.value


def test_a_few_steps_are_not_enough_to_tell(losses):
    assert losses([2.0] * 10, [1.0] * 10)[0].side == "unknown"


def test_each_line_that_calls_backward_has_a_loss_of_its_own(losses):
    second = falling(100, seed=4)
    found = losses(falling(100), falling(100), {"loss:2": second}, {"loss:2": [3 * loss for loss in second]})
    assert {one.series: one.side for one in found} == {"loss": "same", "loss:2": "higher"}


def test_runs_without_a_loss_have_nothing_to_compare(losses):
    assert losses([math.nan] * 30, [math.nan] * 30, bad_events=False) == []


def test_every_step_of_a_long_run_is_compared(losses):
    (found,) = losses(falling(1000), falling(300))
    assert found.num_common == 300
    assert (found.side, found.final_a.step) == ("same", 999)


def test_the_time_of_a_run_is_that_of_all_its_steps_without_sondes_own(tmp_path):
    path = write_pair_run(tmp_path / "run", falling(1000), observed=range(0, 1000, 10), scalars={"step_ms": 10.1})
    view = RunView(Run(path).processes[0])
    assert (view.num_steps, int(view.steps["observed"].sum())) == (1000, 100)
    assert view.total_s == pytest.approx(10.0)
    assert view.elapsed_s == pytest.approx(0.01 * (view.step_numbers + 1))
