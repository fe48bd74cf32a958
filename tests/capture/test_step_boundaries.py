"""The step clock, told what a loop does, call by call."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sonde.capture.step_boundaries import LONGEST_ACCUMULATION, PATIENCE, StepBoundaries


def tell(clock: StepBoundaries, calls: Sequence[str]) -> None:
    """Plays calls: `fetch`, `backward` (or `cleared`, `moved`: one after gradients were cleared, parameters moved), `zero X`, `step X`."""
    for call in calls:
        verb, _, key = call.partition(" ")
        if verb == "fetch":
            ended = clock.batch_fetched()
        elif verb == "step":
            if clock.optimizer_begins(key):
                clock.end()
            ended = clock.optimizer_ended(key)
        elif verb == "zero":
            ended = clock.zeroed(key)
        else:
            ended = clock.backward_begins(cleared=verb == "cleared", moved=verb == "moved")
        if ended:
            clock.end()


def test_with_one_optimizer_each_of_its_steps_ends_a_step() -> None:
    clock = StepBoundaries(known_optimizers=1)
    for number in range(5):
        assert clock.number == number
        tell(clock, ["fetch", "zero a", "backward", "step a"])
    assert clock.number == 5
    assert not clock.active


@given(st.integers(1, 8), st.integers(1, 5))
def test_accumulation_is_one_step_however_many_backward_calls_it_takes(num_backwards: int, num_steps: int) -> None:
    clock = StepBoundaries(known_optimizers=1)
    for _ in range(num_steps):
        tell(clock, ["fetch", "backward"] * num_backwards + ["step a", "zero a"])
    assert clock.number == num_steps


def test_the_cycle_of_two_optimizers_is_learnt_from_its_first_repetition() -> None:
    clock = StepBoundaries(known_optimizers=2)
    for _ in range(6):
        tell(clock, ["backward", "step judge", "backward", "step maker"])
    assert clock.number == 6


def test_a_fetched_batch_ends_the_first_round_of_several_optimizers() -> None:
    clock = StepBoundaries(known_optimizers=2)
    tell(clock, ["fetch", "backward", "step a", "step b"])
    assert clock.number == 0  # a third optimizer might follow
    tell(clock, ["fetch"])
    assert clock.number == 1
    tell(clock, ["backward", "step a", "step b"])
    assert clock.number == 2


def test_clearing_the_first_optimizers_gradients_ends_the_round_before() -> None:
    clock = StepBoundaries(known_optimizers=2)
    tell(clock, ["zero judge", "backward", "step judge", "zero maker", "backward", "step maker"])
    assert clock.number == 0
    tell(clock, ["zero judge"])
    assert clock.number == 1
    assert clock.active  # what was cleared belongs to the step that began


def test_an_optimizer_that_steps_several_times_per_round_ends_a_step_each_time_at_most() -> None:
    """Five steps of the critic for one of the generator: each repetition begins a new step, so none is lost and none is counted twice."""
    clock = StepBoundaries(known_optimizers=2)
    for _ in range(3):
        tell(clock, ["backward", "step critic"] * 5 + ["backward", "step maker"])
    assert 3 <= clock.number <= 18


def test_moving_parameters_by_hand_is_a_step_where_there_is_no_optimizer() -> None:
    clock = StepBoundaries()
    tell(clock, ["backward"] + ["moved"] * 5)
    assert clock.number == 5
    assert clock.active  # the sixth is under way


def test_moving_parameters_by_hand_is_no_step_where_an_optimizer_steps() -> None:
    clock = StepBoundaries(known_optimizers=1)
    for _ in range(6):
        tell(clock, ["backward", "moved", "step a"])
    assert clock.number == 6


def test_a_forgotten_optimizer_step_is_noticed_after_some_patience() -> None:
    clock = StepBoundaries(known_optimizers=1)
    tell(clock, ["backward"] + ["cleared"] * PATIENCE)
    assert clock.number == 0
    tell(clock, ["cleared"] * 4)
    assert clock.number == 4


def test_endless_accumulation_without_any_update_still_advances() -> None:
    clock = StepBoundaries(known_optimizers=1)
    tell(clock, ["backward"] * (LONGEST_ACCUMULATION + 1))
    assert clock.number == 1


CALLS = ["fetch", "backward", "cleared", "moved", "zero a", "zero b", "step a", "step b", "step c"]


@given(st.lists(st.sampled_from(CALLS), max_size=60), st.integers(0, 3))
def test_whatever_a_loop_does_the_number_never_falls_and_never_outruns_the_calls(calls: list[str], known: int) -> None:
    clock = StepBoundaries(known_optimizers=known)
    last = 0
    for done, call in enumerate(calls, 1):
        tell(clock, [call])
        assert last <= clock.number <= done
        last = clock.number
