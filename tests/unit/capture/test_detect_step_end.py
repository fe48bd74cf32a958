"""Where steps end, for loops that are played call by call."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sonde.capture.detect_step_end import LONGEST_ACCUMULATION, PATIENCE, StepBoundaries


def play(boundaries: StepBoundaries, calls: Sequence[str]) -> None:
    """Plays calls: `fetch`, `backward` (or `cleared`, `moved`: one after gradients were cleared, parameters moved), `zero X`, `step X`."""
    for call in calls:
        verb, _, key = call.partition(" ")
        if verb == "fetch":
            ended = boundaries.on_batch_start()
        elif verb == "step":
            if boundaries.on_optimizer_step_start(key):
                boundaries.end_step()
            ended = boundaries.on_optimizer_step_end(key)
        elif verb == "zero":
            ended = boundaries.on_zero_grad(key)
        else:
            ended = boundaries.on_backward_start(has_cleared=verb == "cleared", has_moved=verb == "moved")
        if ended:
            boundaries.end_step()


def test_with_one_optimizer_each_of_its_steps_ends_a_step() -> None:
    boundaries = StepBoundaries(num_optimizers=1)
    for number in range(5):
        assert boundaries.number == number
        play(boundaries, ["fetch", "zero a", "backward", "step a"])
    assert boundaries.number == 5
    assert not boundaries.is_active


@given(st.integers(1, 8), st.integers(1, 5))
def test_accumulation_is_one_step_however_many_backward_calls_it_takes(num_backwards: int, num_steps: int) -> None:
    boundaries = StepBoundaries(num_optimizers=1)
    for _ in range(num_steps):
        play(boundaries, ["fetch", "backward"] * num_backwards + ["step a", "zero a"])
    assert boundaries.number == num_steps


def test_the_cycle_of_two_optimizers_is_learnt_from_its_first_repetition() -> None:
    boundaries = StepBoundaries(num_optimizers=2)
    for _ in range(6):
        play(boundaries, ["backward", "step judge", "backward", "step maker"])
    assert boundaries.number == 6


def test_a_fetched_batch_ends_the_first_round_of_several_optimizers() -> None:
    boundaries = StepBoundaries(num_optimizers=2)
    play(boundaries, ["fetch", "backward", "step a", "step b"])
    assert boundaries.number == 0  # a third optimizer might follow
    play(boundaries, ["fetch"])
    assert boundaries.number == 1
    play(boundaries, ["backward", "step a", "step b"])
    assert boundaries.number == 2


def test_clearing_the_first_optimizers_gradients_ends_the_round_before() -> None:
    boundaries = StepBoundaries(num_optimizers=2)
    play(boundaries, ["zero judge", "backward", "step judge", "zero maker", "backward", "step maker"])
    assert boundaries.number == 0
    play(boundaries, ["zero judge"])
    assert boundaries.number == 1
    assert boundaries.is_active  # what was cleared belongs to the step that began


def test_an_optimizer_that_steps_several_times_per_round_ends_a_step_each_time_at_most() -> None:
    """Five steps of the critic for one of the generator: each repetition begins a new step, so none is lost and none is counted twice."""
    boundaries = StepBoundaries(num_optimizers=2)
    for _ in range(3):
        play(boundaries, ["backward", "step critic"] * 5 + ["backward", "step maker"])
    assert 3 <= boundaries.number <= 18


def test_moving_parameters_by_hand_is_a_step_where_there_is_no_optimizer() -> None:
    boundaries = StepBoundaries()
    play(boundaries, ["backward"] + ["moved"] * 5)
    assert boundaries.number == 5
    assert boundaries.is_active  # the sixth is under way


def test_moving_parameters_by_hand_is_no_step_where_an_optimizer_steps() -> None:
    boundaries = StepBoundaries(num_optimizers=1)
    for _ in range(6):
        play(boundaries, ["backward", "moved", "step a"])
    assert boundaries.number == 6


def test_a_forgotten_optimizer_step_is_noticed_after_some_patience() -> None:
    boundaries = StepBoundaries(num_optimizers=1)
    play(boundaries, ["backward"] + ["cleared"] * PATIENCE)
    assert boundaries.number == 0
    play(boundaries, ["cleared"] * 4)
    assert boundaries.number == 4


def test_endless_accumulation_without_any_update_still_advances() -> None:
    boundaries = StepBoundaries(num_optimizers=1)
    play(boundaries, ["backward"] * (LONGEST_ACCUMULATION + 1))
    assert boundaries.number == 1


CALLS = ["fetch", "backward", "cleared", "moved", "zero a", "zero b", "step a", "step b", "step c"]


@given(st.lists(st.sampled_from(CALLS), max_size=60), st.integers(0, 3))
def test_whatever_a_loop_does_the_number_never_falls_and_never_outruns_the_calls(calls: list[str], known: int) -> None:
    boundaries = StepBoundaries(num_optimizers=known)
    last = 0
    for done, call in enumerate(calls, 1):
        play(boundaries, [call])
        assert last <= boundaries.number <= done
        last = boundaries.number
