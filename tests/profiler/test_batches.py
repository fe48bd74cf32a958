"""How many samples a step works on, whatever sees them how often."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sonde.profiler.samples_per_step import Batch, Seen, seen_in

pytestmark = pytest.mark.torch


def calls(*sizes: int, backward: int = 0, update: int = 0) -> list[Batch]:
    return [Batch(size, None, f"float32 [{size}]", backward, update) for size in sizes]


def test_what_a_cell_sees_again_and_again_before_one_backward_is_one_batch() -> None:
    assert seen_in([calls(32), calls(*[32] * 20)]) == Seen(32, None, "float32 [32]")


def test_accumulation_adds_up() -> None:
    assert seen_in([[*calls(8), *calls(8, backward=1), *calls(6, backward=2)]]) == Seen(22, None, "3 x float32 [8]")


def test_what_two_optimizers_learn_from_is_counted_once() -> None:
    critic = [*calls(64, 64), *calls(64, backward=1, update=1)]
    assert seen_in([critic, calls(64)]).num_samples == 64


def test_two_views_of_each_sample_are_as_many_samples_as_the_loader_gave() -> None:
    assert seen_in([calls(128)], num_fetched=64).num_samples == 64
    assert seen_in([calls(64)], num_fetched=640).num_samples == 64  # a validation was in between


def test_tokens_are_known_where_every_batch_has_them() -> None:
    tokens = [Batch(4, 40, "int64 [4, 10]"), Batch(4, 44, "int64 [4, 11]", backward=1)]
    assert seen_in([tokens]).num_tokens == 84
    assert seen_in([]) == Seen(None, None, "")
