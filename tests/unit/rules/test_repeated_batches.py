"""Batches of a DataLoader that come again, by the hashes of their contents."""

from __future__ import annotations

from sonde.rules._shared.repeated_batches import RepeatedBatches, repeated_batches
from synthetic_steps import fed, training, view_of


def repeated(content, num_steps=10, observed=lambda step: True, data=None, scalars=lambda step: {}):
    with view_of(fed(training(num_steps, observed=observed, scalars=scalars), content, data)) as view:
        return repeated_batches(view)


def test_batches_are_compared_with_the_first_and_with_the_one_before():
    batches = repeated(lambda step: (step // 3, 1))
    assert batches == RepeatedBatches(num=10, num_like_first=3, num_adjacent=9, num_alike=6, first_step=0, last_step=9, size=32)


def test_all_tensors_of_a_batch_are_compared():
    assert repeated(lambda step: (7, step)).num_alike == 0
    assert repeated(lambda step: (7, 8)).num_alike == 9


def test_batches_of_steps_that_lie_apart_are_no_pair():
    batches = repeated(lambda step: (7, 8), observed=lambda step: step in (2, 3, 5, 8))
    assert (batches.num, batches.num_adjacent, batches.first_step, batches.last_step) == (4, 1, 2, 8)


def test_a_batch_without_a_hash_is_left_out():
    batches = repeated(lambda step: (7, float("nan") if step == 4 else 8))
    assert (batches.num, batches.num_adjacent) == (9, 7)


def test_steps_with_several_batches_are_left_out():
    assert repeated(lambda step: (7, 8), data=lambda step: {"num_fetched": 1 + step % 2}).num == 5
    assert repeated(lambda step: (7, 8), scalars=lambda step: {"backwards": 1.0 + (step < 4)}).num == 6


def test_a_run_without_batches_of_a_loader_has_nothing_to_compare():
    assert repeated(None) == RepeatedBatches()
    assert repeated(lambda step: (7, 8), data=lambda step: {"num_fetched": 0}) == RepeatedBatches()
