"""Where the numbers of two runs part: the step, and in it the first place in the order in which numbers come about."""

import itertools
import math

import pytest

from comparison_runs import falling, write_pair_run
from sonde.comparison.first_divergence import find_first_divergence
from sonde.events import Kind
from sonde.run_view import RunView
from sonde.runlog.run_reader import Run

LOSSES = falling(60)


@pytest.fixture
def parting(tmp_path):
    """`parting(a, b)` of two runs that are written with these arguments."""

    number = itertools.count()

    def find(a=None, b=None, *, losses_a=LOSSES, losses_b=LOSSES, exact=True):
        views = [
            RunView(Run(write_pair_run(tmp_path / f"{name}{next(number)}", losses, **(given or {}))).processes[0])
            for name, losses, given in (("a", losses_a, a), ("b", losses_b, b))
        ]
        return find_first_divergence(*views, exact=exact)

    return find


def test_equal_runs_do_not_part_and_it_is_said_how_much_was_compared(parting):
    found = parting()
    assert found.first is None
    assert (found.num_common, found.num_both_observed, found.last_equal_step) == (60, 6, 59)
    assert found.meaning == ""


def test_only_steps_that_both_observed_are_compared_by_their_statistics(parting):
    different = {(0, Kind.ACTIVATION, "head"): {"mean": 9.0}}
    found = parting({"observed": range(0, 60, 7)}, {"observed": range(1, 60, 7), "changes": different})
    assert found.num_both_observed == 0
    assert found.first is None


def test_the_first_layer_in_forward_order_is_named_with_both_numbers(parting):
    changes = {(30, Kind.ACTIVATION, "head"): {"mean": 5.0}, (30, Kind.ACTIVATION, "middle"): {"mean": 0.5}}
    found = parting(None, {"changes": changes})
    assert (found.first.step, found.first.kind, found.first.where) == (30, Kind.ACTIVATION, "middle")
    assert (found.first.statistic, found.first.a, found.first.b) == ("mean", pytest.approx(0.13), 0.5)
    assert (found.last_equal_step, found.observed_before) == (29, 20)
    assert (found.num_differing, found.num_compared) == (2, 16)
    assert "has another output" in found.meaning


def test_gradients_are_looked_at_from_the_loss_backwards(parting):
    changes = {(10, Kind.GRADIENT, layer): {"l2": 1.0} for layer in ("encoder", "head")}
    found = parting(None, {"changes": changes})
    assert (found.first.kind, found.first.where) == (Kind.GRADIENT, "head.weight")
    assert "the forward pass is the same" in found.meaning


@pytest.mark.parametrize(
    "kind, layer, words",
    [
        (Kind.UPDATE, "encoder", "the options of the optimizer"),
        (Kind.PARAMETER, "encoder", "an update after step 20"),
        (Kind.BATCH, "batch", "different data"),
    ],
)
def test_what_comes_before_a_difference_tells_what_it_stems_from(parting, kind, layer, words):
    found = parting(None, {"changes": {(25, kind, layer): {"std": 3.0}}})
    assert found.first.step == 30
    assert words in found.meaning
    assert not found.from_the_start


def test_other_parameters_in_the_first_step_were_never_meant_to_be_the_same(parting):
    found = parting(None, {"changes": {(0, Kind.PARAMETER, "encoder"): {"mean": 0.7}}})
    assert found.from_the_start
    assert not found.meant_to_be_same
    assert "another seed" in found.meaning


def test_another_order_of_samples_shows_in_the_content_of_a_batch_alone(parting):
    found = parting(None, {"changes": {(20, Kind.BATCH, "batch"): {"hash": 12345.0}}})
    assert (found.first.kind, found.first.statistic, found.first.step) == (Kind.BATCH, "hash", 20)
    assert not found.first.by_rounding


def test_a_loss_that_differs_where_nobody_looked_leads_to_the_next_step_that_both_observed(parting):
    later = {(14, Kind.PARAMETER, "middle"): {"mean": 0.9}}
    losses = [loss + (0.5 if step >= 14 else 0.0) for step, loss in enumerate(LOSSES)]
    found = parting(None, {"changes": later}, losses_b=losses)
    assert (found.first.step, found.first.where, found.last_equal_step) == (14, "loss", 13)
    assert (found.nearest.step, found.nearest.where) == (20, "middle.weight")
    assert "not observed in both" in found.meaning


def test_the_learning_rate_is_compared_in_every_step(parting):
    rates = [0.1 if step < 33 else 0.01 for step in range(60)]
    found = parting(None, {"scalars": {"lr": rates}})
    assert (found.first.step, found.first.where, found.first.b) == (33, "lr", 0.01)


def test_a_norm_of_gradients_is_not_compared_between_an_observed_step_and_another(parting):
    norms = [1.0 if step % 10 == 0 else 1.0 + 1e-9 for step in range(60)]
    assert parting({"observed": range(0, 60, 5), "scalars": {"grad_norm": norms}}, {"scalars": {"grad_norm": 1.0}}).first.step == 1
    only_ours = [1.0 + 1e-9 if step == 5 else 1.0 for step in range(60)]
    assert parting({"observed": range(0, 60, 5), "scalars": {"grad_norm": only_ours}}, {"scalars": {"grad_norm": 1.0}}).first is None


def test_differences_in_the_last_digits_are_called_rounding(parting):
    found = parting(None, {"changes": {(20, Kind.ACTIVATION, "head"): {"max": 2.0 + 4e-7}}})
    assert found.first.by_rounding
    assert "by rounding alone" in found.meaning
    assert not parting(None, {"changes": {(20, Kind.ACTIVATION, "head"): {"max": 2.001}}}).first.by_rounding


def test_a_count_is_never_a_matter_of_rounding(parting):
    found = parting(None, {"changes": {(20, Kind.ACTIVATION, "head"): {"nan": 1.0, "mean": 0.2}}})
    assert (found.first.statistic, found.first.b) == ("nan", 1.0)
    assert not found.first.by_rounding


def test_what_different_code_computed_is_compared_loosely(parting):
    nearly = {(0, Kind.ACTIVATION, "head"): {"std": 1 + 1e-5}, (20, Kind.ACTIVATION, "encoder"): {"mean": 0.9}}
    assert parting(None, {"changes": nearly}).first.step == 0
    found = parting(None, {"changes": nearly}, exact=False)
    assert (found.first.step, found.first.where) == (20, "encoder")


def test_numbers_that_are_not_finite_are_equal_to_themselves_and_to_nothing_else(parting):
    nan = {(20, Kind.ACTIVATION, "head"): {"mean": math.nan, "max": math.inf}}
    assert parting({"changes": nan}, {"changes": nan}).first is None
    found = parting(None, {"changes": nan})
    assert found.first.step == 20
    assert found.first.relative == math.inf


def test_a_loss_that_is_nan_in_one_run_alone_is_a_difference_and_a_missing_one_is_not(parting):
    losses = [*LOSSES[:40], *[math.nan] * 20]
    assert parting(losses_b=losses).first.step == 40
    assert parting(losses_a=losses, losses_b=losses).first is None
    assert parting({}, {"bad_events": False}, losses_b=losses).first is None


def test_layers_are_matched_by_path_and_those_of_one_run_alone_are_left_out(parting):
    found = parting({"layers": ("encoder", "extra", "head")}, {"layers": ("encoder", "head", "other")})
    assert found.first is None
    assert found.num_both_observed == 6


def test_where_no_layer_is_in_both_nothing_is_said_of_what_layers_put_out(parting):
    found = parting({"layers": ("encoder",)}, {"layers": ("decoder",)}, losses_b=[2 * loss for loss in LOSSES])
    assert (found.first.step, found.first.where) == (0, "loss")
    assert "no layer was measured in both" in found.meaning


def test_a_step_that_one_of_them_kept_in_double_precision_is_not_a_difference(parting):
    tiny = {(0, Kind.ACTIVATION, "head"): {"min": 1e-300}}
    same = {(0, Kind.ACTIVATION, "head"): {"min": 0.0}}
    found = parting({"changes": tiny}, {"changes": same})
    assert found.first is None  # 0.13 in double and in single precision are the same measurement


def test_runs_of_unequal_length_are_compared_as_far_as_both_go(parting):
    found = parting(losses_a=LOSSES, losses_b=LOSSES[:25])
    assert (found.num_common, found.num_both_observed, found.first) == (25, 3, None)
