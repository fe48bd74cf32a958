"""The number of samples of a step, whichever modules receive them and how often."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sonde.profiler.samples_per_step import InputBatch, StepSamples, samples_per_step

pytestmark = pytest.mark.torch


def calls(*sizes: int, num_backwards: int = 0, num_updates: int = 0) -> list[InputBatch]:
    return [InputBatch(size, None, f"float32 [{size}]", num_backwards, num_updates) for size in sizes]


def test_repeated_calls_before_one_backward_are_one_batch() -> None:
    assert samples_per_step([calls(32), calls(*[32] * 20)]) == StepSamples(32, None, "float32 [32]")


def test_the_batches_of_gradient_accumulation_add_up() -> None:
    batches = [*calls(8), *calls(8, num_backwards=1), *calls(6, num_backwards=2)]
    assert samples_per_step([batches]) == StepSamples(22, None, "3 x float32 [8]")


def test_samples_that_two_optimizers_learn_from_count_once() -> None:
    critic = [*calls(64, 64), *calls(64, num_backwards=1, num_updates=1)]
    assert samples_per_step([critic, calls(64)]).num_samples == 64


def test_two_views_of_each_sample_count_as_one_if_the_loader_gave_one() -> None:
    assert samples_per_step([calls(128)], num_fetched=64).num_samples == 64
    assert samples_per_step([calls(64)], num_fetched=640).num_samples == 64  # a validation ran in between


def test_tokens_are_counted_if_every_batch_has_them() -> None:
    tokens = [InputBatch(4, 40, "int64 [4, 10]"), InputBatch(4, 44, "int64 [4, 11]", num_backwards=1)]
    assert samples_per_step([tokens]).num_tokens == 84
    assert samples_per_step([]) == StepSamples(None, None, "")
