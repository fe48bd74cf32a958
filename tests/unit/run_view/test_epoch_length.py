"""How long an epoch is, and how many there are: from passes over a loader, from a framework, or from evaluations."""

from __future__ import annotations

from sonde.events import Event
from sonde.run_view.epoch_length import FEWEST
from synthetic_steps import training, view_of


def data_pass(step, loader=0, num=1, num_batches=20, **given):
    return Event("pass", step, {"loader": loader, "num": num, "num_batches": num_batches, **given})


def in_loop(step, at, planned=10, loop="train.py:15", **given):
    return data_pass(step, **({"num": at + 1} | given), planned=planned, at=at, loop=loop, breaks=["train.py:30"])


def epochs_of(*events, num_steps=100, evaluated=lambda step: False):
    by_step = {}
    for event in events:
        by_step.setdefault(event.step, []).append(event)
    steps = training(num_steps, events=by_step, scalars=lambda step: {"eval_forwards": 3.0 * evaluated(step)})
    with view_of(steps) as view:
        return view.epochs


def test_an_epoch_is_as_long_as_from_pass_to_pass_on_average():
    epochs = epochs_of(*(data_pass(step, num=1 + at) for at, step in enumerate((0, 20, 41, 60))))
    assert (epochs.length, epochs.sure_length, epochs.num) == (20, 20, 4)


def test_two_passes_do_not_make_an_epoch():
    assert FEWEST == 3
    epochs = epochs_of(data_pass(0), data_pass(20, num=2))
    assert (epochs.length, epochs.num) == (0, 0)


def test_passes_in_the_same_step_are_one_beginning():
    epochs = epochs_of(data_pass(0), data_pass(0, num=2), data_pass(20, num=3))
    assert (epochs.loaders[0].num, epochs.length) == (2, 0)


def test_the_loader_with_the_longest_passes_is_that_of_the_training():
    own = [data_pass(step) for step in (0, 30, 60)]
    short = [data_pass(step, loader=1) for step in range(0, 60, 5)]
    epochs = epochs_of(*own, *short)
    assert (epochs.length, epochs.num) == (30, 3)


def test_a_framework_reports_its_epochs():
    epochs = epochs_of(*(Event("epoch", step, {"epoch": step / 25, "framework_step": step}) for step in (0, 25, 50, 75)))
    assert (epochs.sure_length, epochs.num) == (25, 4)


def test_without_passes_evaluations_stand_for_epochs_but_are_not_sure():
    epochs = epochs_of(evaluated=lambda step: step % 10 == 9)
    assert (epochs.length, epochs.sure_length, epochs.num) == (10, 0, 10)


def test_passes_come_before_evaluations():
    epochs = epochs_of(*(data_pass(step) for step in (0, 40, 80)), evaluated=lambda step: step % 10 == 9)
    assert (epochs.length, epochs.num) == (40, 3)


def test_the_loop_over_epochs_is_known_by_its_line_and_its_planned_rounds():
    epochs = epochs_of(*(in_loop(20 * at, at) for at in range(4)))
    assert epochs.loop is not None
    assert (epochs.loop.line, epochs.loop.break_lines, epochs.loop.num_passes) == ("train.py:15", ["train.py:30"], 4)
    assert epochs.num_planned == 10


def test_a_loop_that_passes_over_the_loader_twice_in_a_round_is_not_regular():
    epochs = epochs_of(in_loop(0, 0), in_loop(10, 0, num=2), in_loop(20, 1, num=3))
    assert epochs.loop is None
    assert epochs.num_planned == 0


def test_a_loop_whose_later_passes_are_not_recorded_is_not_regular():
    assert epochs_of(in_loop(0, 0), in_loop(20, 1), in_loop(40, 2, last_told=True)).loop is None


def test_without_a_loop_no_epochs_are_planned():
    assert epochs_of(*(data_pass(20 * at, num=at + 1) for at in range(4))).num_planned == 0


def test_a_loader_that_each_round_creates_anew_is_one_loader():
    epochs = epochs_of(*(in_loop(20 * at, at, loader=at, num=1) for at in range(4)))
    assert list(epochs.loaders) == [0]
    assert (epochs.length, epochs.num, epochs.num_planned) == (20, 4, 10)


def test_a_loader_of_another_loop_or_of_another_length_is_another():
    assert list(epochs_of(in_loop(0, 0), in_loop(20, 1, loader=1, num=1, loop="train.py:50")).loaders) == [0, 1]
    assert list(epochs_of(in_loop(0, 0), in_loop(20, 1, loader=1, num=1, num_batches=5)).loaders) == [0, 1]


def test_of_two_loops_the_last_one_counts():
    epochs = epochs_of(in_loop(0, 0, planned=2), in_loop(20, 1, planned=2), in_loop(40, 0, planned=7, loader=1, loop="train.py:50"))
    assert epochs.num_planned == 7


def test_the_first_pass_is_over_after_as_many_backwards_as_the_loader_has_batches():
    epochs = epochs_of(data_pass(0, num_batches=50))
    assert not epochs.is_beyond_first(49)
    assert epochs.is_beyond_first(50)


def test_the_first_pass_over_a_loader_of_unknown_length_is_over_after_more_passes():
    assert not epochs_of(data_pass(0, num_batches=None)).is_beyond_first(1000)
    assert epochs_of(*(data_pass(step, num_batches=None) for step in (0, 20, 40))).is_beyond_first(1)


def test_where_no_pass_is_known_the_first_may_be_over():
    assert epochs_of().is_beyond_first(0)
