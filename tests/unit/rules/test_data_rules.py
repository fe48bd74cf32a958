"""The rules about what goes in: batches, samples, labels, and the workers that make them."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from sonde.events import Event, Severity, Step
from sonde.report.run_summary import summarize
from sonde.rules.data.constant_input import RULE as constant_input
from sonde.rules.data.iterable_duplicated import RULE as iterable_duplicated
from sonde.rules.data.label_constant import RULE as label_constant
from sonde.rules.data.nan_input import RULE as nan_input
from sonde.rules.data.no_shuffle import RULE as no_shuffle
from sonde.rules.data.same_batch import RULE as same_batch
from sonde.rules.data.worker_rng_duplicate import RULE as worker_rng_duplicate
from sonde.rules.rule import Clear
from synthetic_steps import (
    SITES,
    ask,
    falling,
    fed,
    loader,
    mixed,
    opening,
    some_labels,
    sometimes,
    the_finding,
    training,
    view_of,
    why_not,
)


def steps_with(content=None, data=None, labels=None, num=100, start=None, observed=sometimes):
    """A training from a DataLoader whose observed steps say what it handed out, and what is noted of that."""
    start = [*opening(), *([loader()] if start is None else start)]
    return fed(training(num, start=start, observed=observed), content, data, labels)


def sorted_labels(step):
    """Twenty batches of 32 in an epoch, two of each class."""
    return some_labels({step % 20 // 2: 32}, in_order=True)


# -- nan-input -------------------------------------------------------------------------------------


def bad(what, step, **given):
    return Event("nonfinite", step, {"what": what, "where": "x", "num_elements": 640, "num_nan": 3, "num_inf": 0} | given)


def fails_at(step):
    return lambda each: falling(each) if each < step else nan


def test_a_bad_input_in_the_step_in_which_the_gradient_goes_bad_is_found():
    finding = the_finding(nan_input, training(events={40: [bad("input", 40), bad("gradient", 40)], 60: [bad("input", 60)]}))
    assert (finding.step, finding.severity, finding.evidence["steps_with_bad_input"]) == (40, Severity.CRITICAL, 2)


def test_a_bad_input_of_the_step_that_the_run_did_not_complete_is_found():
    steps = [*training(50), Step(50, 0, {}, {}, (bad("input", 50), bad("loss", 50)), SITES)]
    assert the_finding(nan_input, steps).step == 50


def test_a_bad_input_some_steps_before_the_loss_goes_bad_is_clear():
    assert ask(nan_input, training(loss=fails_at(40), events={30: [bad("input", 30)]})) == Clear()


# -- same-batch ------------------------------------------------------------------------------------


def test_the_same_batch_in_every_step_is_found_with_the_line_of_its_loader():
    finding = the_finding(same_batch, steps_with(lambda step: (7, 8)))
    assert (finding.severity, finding.step, finding.evidence["source"]) == (Severity.ERROR, 0, "train.py:15")
    assert "20 batches" in finding.cause


def test_other_batches_are_clear_and_so_are_the_same_samples_with_other_labels():
    assert ask(same_batch, steps_with(lambda step: (step, step))) == Clear()
    assert ask(same_batch, steps_with(lambda step: (7, step))) == Clear()


def test_a_loader_with_one_batch_hands_it_out_again():
    assert ask(same_batch, steps_with(lambda step: (7, 8), start=[loader(num_batches=1)])) == Clear()


def test_batches_that_come_again_with_each_epoch_are_not_taken_for_one():
    """Every twentieth step was looked at, and an epoch has twenty."""
    steps = steps_with(lambda step: (step % 20, 1), num=400, observed=lambda step: step % 20 == 0)
    assert "right after another" in why_not(same_batch, steps)


def test_where_several_batches_make_a_step_the_first_may_be_the_same_each_time():
    """An epoch of four batches whose gradients are added up, or a small loader beside a large one."""
    steps = steps_with(lambda step: (7, 8))
    accumulated = [replace(step, scalars={**step.scalars, "backwards": 4.0}) for step in steps]
    assert "no batch of a DataLoader" in why_not(same_batch, accumulated)
    assert "no batch of a DataLoader" in why_not(same_batch, steps_with(lambda step: (7, 8), data=lambda step: {"num_fetched": 2}))


def test_a_loader_that_is_started_for_something_else_before_the_training_is_not_that_of_the_training():
    """A validation, or the mean of the data; and a validation after the first epoch."""
    first, own, last = (loader(num_batches=num, line=f"train.py:{num}") for num in (1, 40, 2))
    steps = fed(training(100, start=[first, own, *opening(), last]), lambda step: (7, 8))
    assert the_finding(same_batch, steps).evidence["source"] == "train.py:40"


def test_the_same_batch_is_not_judged_without_a_loader_or_its_length():
    assert "no batch of a DataLoader" in why_not(same_batch, steps_with())
    assert "how many batches" in why_not(same_batch, steps_with(lambda step: (7, 8), start=[loader(num_batches=0, order="stream")]))


def test_the_same_batch_in_the_first_steps_is_a_check():
    assert "only 6 batches" in why_not(same_batch, steps_with(lambda step: (7, 8), num=6))


# -- constant-input --------------------------------------------------------------------------------


def alike(step):
    return {"num_alike": 1, "sample": 1234}


def test_the_same_input_for_all_samples_of_all_batches_is_critical():
    finding = the_finding(constant_input, steps_with(lambda step: (7, step), data=alike))
    assert (finding.severity, finding.evidence["value"], finding.evidence["source"]) == (Severity.CRITICAL, 0.0, "train.py:19")
    assert "every number was 0" in finding.cause


def test_copies_of_one_sample_that_change_with_the_step_are_clear():
    assert ask(constant_input, steps_with(data=lambda step: {"num_alike": 1, "sample": step})) == Clear()


def test_one_input_that_varies_is_enough():
    assert ask(constant_input, steps_with(data=lambda step: alike(step) | {"num_inputs": 2})) == Clear()


def test_one_batch_of_zeros_is_clear():
    assert ask(constant_input, steps_with(data=lambda step: alike(step) if step == 0 else {})) == Clear()


def test_constant_inputs_are_not_judged_where_there_is_nothing_to_compare():
    assert "one sample" in why_not(constant_input, steps_with(data=lambda step: {"size": 1, "num_inputs": 0}))
    assert "no batch" in why_not(constant_input, training())
    assert "only 3" in why_not(constant_input, steps_with(data=alike, num=3))


# -- label-constant --------------------------------------------------------------------------------


def one_class(step):
    return some_labels({4: 32}, in_order=True)


def test_one_class_in_every_batch_is_critical():
    finding = the_finding(label_constant, steps_with(labels=one_class))
    assert (finding.severity, finding.evidence["label"], finding.evidence["num_classes"]) == (Severity.CRITICAL, 4, 10)


def test_labels_of_several_classes_are_clear():
    assert ask(label_constant, steps_with(labels=mixed)) == Clear()
    assert ask(label_constant, steps_with(labels=sorted_labels)) == Clear()


def test_sorted_labels_in_their_first_epoch_are_not_called_constant():
    assert "been through its data" in why_not(label_constant, steps_with(labels=one_class, start=[loader(num_batches=500)]))


def test_one_label_for_inputs_that_are_optimized_is_not_judged():
    frozen = opening(optimizers=[{"optimizer": 0, "num_owned": 0, "num_foreign": 1}])[3]
    assert "no parameter" in why_not(label_constant, steps_with(labels=one_class, start=[loader(), frozen]))


def test_one_answer_to_scores_that_no_trained_weights_make_is_not_judged():
    def first_column(step):
        return some_labels({0: 32}, in_order=True) | {"is_learnt": False}

    assert "not made by weights" in why_not(label_constant, steps_with(labels=first_column))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (steps_with(labels=lambda step: some_labels({4: 2}), num=100), "with 36 labels"),
        (steps_with(labels=one_class, observed=lambda step: step % 20 == 0), "only 5 batches"),
        (steps_with(labels=one_class, num=20, start=[]), "been through its data"),
    ],
    ids=["few_labels", "few_batches", "few_steps"],
)
def test_one_class_is_not_believed_before_enough_was_seen(steps, words):
    assert words in why_not(label_constant, steps)


def test_labels_are_not_judged_where_none_were_seen():
    assert "no class labels" in why_not(label_constant, steps_with())


# -- no-shuffle ------------------------------------------------------------------------------------


def test_labels_that_come_sorted_are_a_warning():
    finding = the_finding(no_shuffle, steps_with(labels=sorted_labels, num=400))
    assert (finding.severity, finding.evidence["distinct"]) == (Severity.WARNING, 1.0)
    assert finding.evidence["distinct_by_chance"] > 5
    assert "a batch of 32 has 1 class, where chance gives 6.47" in finding.cause
    assert "does not shuffle" in finding.cause


def test_sorted_batches_made_by_hand_are_found_when_their_labels_come_back():
    finding = the_finding(no_shuffle, steps_with(labels=sorted_labels, num=400, start=[]))
    assert finding.evidence["source"] == "train.py:19"


def first_one_then_the_other(step):
    """Twenty batches in an epoch, ten of each class."""
    return some_labels({step % 20 // 10: 32}, num_classes=2, in_order=True)


def test_two_classes_one_after_the_other_are_sorted_too():
    assert the_finding(no_shuffle, steps_with(labels=first_one_then_the_other, num=400)).evidence["distinct"] == 1.0


def test_two_classes_in_turn_are_clear():
    """A discriminator is given real samples, then made ones."""
    def in_turn(step):
        return some_labels({step % 2: 32}, num_classes=2, in_order=True)

    assert ask(no_shuffle, steps_with(labels=in_turn, num=400, start=[])) == Clear()


def test_a_class_of_its_own_for_each_batch_is_sorted_where_the_next_one_follows():
    def one_each(step):
        return some_labels({step % 10: 32}, in_order=True)

    assert the_finding(no_shuffle, steps_with(labels=one_each, num=400)).evidence["distinct"] == 1.0


def test_shuffled_labels_are_clear():
    assert ask(no_shuffle, steps_with(labels=mixed)) == Clear()


def test_batches_that_are_sorted_within_are_clear():
    """As a collate_fn may do it: all classes are there."""
    assert ask(no_shuffle, steps_with(labels=lambda step: mixed(step) | {"in_order": True})) == Clear()


def test_labels_of_parts_of_samples_say_nothing_of_the_order_of_samples():
    """One for each token or pixel."""
    assert "no class labels" in why_not(no_shuffle, steps_with(labels=lambda step: some_labels({step % 20 // 2: 320}, in_order=True)))


def test_a_few_sorted_batches_are_not_judged():
    assert "only 6 batches" in why_not(no_shuffle, steps_with(labels=sorted_labels, num=6))


def test_tasks_that_are_learnt_one_after_another_are_clear():
    """Two classes at a time, shuffled."""
    def tasks(step):
        return some_labels({step // 40 * 2: 15, step // 40 * 2 + 1: 17})

    assert ask(no_shuffle, steps_with(labels=tasks, num=400, start=[])) == Clear()


def test_classes_that_are_learnt_one_after_another_and_never_return_are_not_judged():
    def tasks(step):
        return some_labels({step // 40: 32}, in_order=True)

    assert "come back" in why_not(no_shuffle, steps_with(labels=tasks, num=400, start=[]))


def test_a_rare_class_that_misses_in_most_batches_is_clear():
    """In order, since they are all alike; and chance would give no more."""
    def rare(step):
        return some_labels({0: 32} if step % 8 else {0: 31, 1: 1}, num_classes=2, in_order=True)

    assert ask(no_shuffle, steps_with(labels=rare, num=400)) == Clear()


def test_a_rare_class_whose_few_samples_lie_together_is_clear():
    """One batch in twelve has some of it: hardly any other has, whatever the order."""
    def rare(step):
        return some_labels({0: 32} if step % 12 else {0: 29, 1: 3}, num_classes=2, in_order=True)

    assert ask(no_shuffle, steps_with(labels=rare, num=400)) == Clear()


def test_a_sampler_that_gives_each_batch_one_class_by_chance_is_clear():
    def jumping(step):
        return some_labels({step * 7 % 10: 32}, in_order=True)

    assert ask(no_shuffle, steps_with(labels=jumping, num=400, start=[loader(order="other")])) == Clear()


def test_a_loader_that_shuffles_is_believed():
    assert ask(no_shuffle, steps_with(labels=sorted_labels, num=400, start=[loader(order="random")])) == Clear()


# -- workers ---------------------------------------------------------------------------------------


def test_a_stream_that_every_worker_delivers_is_found():
    start = [loader(order="stream", num_batches=0, num_workers=2, knows_worker=False, dataset="Records")]
    finding = the_finding(iterable_duplicated, steps_with(lambda step: (step // 2, step // 2), start=start))
    assert (finding.severity, finding.evidence["num_workers"]) == (Severity.WARNING, 2)
    assert "Records" in finding.cause


@pytest.mark.parametrize(("knows", "copies"), [(True, 2), (False, 1)], ids=["divided", "drawn_at_random"])
def test_a_stream_that_is_divided_or_drawn_at_random_is_clear(knows, copies):
    start = [loader(order="stream", num_batches=0, num_workers=2, knows_worker=knows)]
    assert ask(iterable_duplicated, steps_with(lambda step: (step // copies, 1), start=start)) == Clear()


def test_two_batches_that_happen_to_be_alike_do_not_make_a_stream_that_comes_twice():
    start = [loader(order="stream", num_batches=0, num_workers=2, knows_worker=False)]
    assert ask(iterable_duplicated, steps_with(lambda step: (max(step, 1), 1), start=start)) == Clear()


def test_a_stream_is_not_judged_by_batches_that_lie_apart_nor_with_one_worker():
    two, one = ([loader(order="stream", num_batches=0, num_workers=num, knows_worker=False)] for num in (2, 1))
    assert "only 0 batches" in why_not(iterable_duplicated, steps_with(lambda step: (1, 1), start=two, observed=lambda step: step % 2 == 0))
    assert "no IterableDataset" in why_not(iterable_duplicated, steps_with(lambda step: (step // 2, 1), start=one))


def test_a_loader_of_known_length_is_no_stream():
    assert "no IterableDataset" in why_not(iterable_duplicated, steps_with(lambda step: (step // 2, 1), start=[loader(num_workers=2)]))


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"copied_generators": ["augment.rng"], "seeded_alike": []}, "copy of augment.rng of the Digits"),
        ({"copied_generators": [], "copied_globals": ["rng"], "seeded_alike": []}, "copy of the generator rng, and again"),
        ({"copied_generators": [], "seeded_alike": ["numpy"]}, "seeds np.random with the same number"),
    ],
    ids=["copied", "of_a_module", "seeded"],
)
def test_workers_that_draw_the_same_are_a_warning(about, words):
    finding = the_finding(worker_rng_duplicate, steps_with(start=[loader(num_workers=4, **about)]))
    assert finding.severity == Severity.WARNING
    assert words in finding.cause


def test_workers_that_draw_differently_are_clear_and_without_workers_nothing_is_judged():
    assert ask(worker_rng_duplicate, steps_with(start=[loader(num_workers=4, copied_generators=[], seeded_alike=[])])) == Clear()
    assert "several workers" in why_not(worker_rng_duplicate, steps_with())


# -- the summary of the data -----------------------------------------------------------------------


def summary(steps):
    with view_of(steps) as view:
        return dict(summarize(view, {}))


def test_the_summary_names_the_loader_and_how_often_each_label_comes():
    start = [loader(num_workers=2, batch_size=32, order="random")]
    sentences = summary(steps_with(labels=lambda step: some_labels({0: 24, 3: 8}), start=start))
    assert sentences["data"] == "20 batches of 32 from the DataLoader at train.py:15, shuffled, 2 workers"
    assert sentences["labels"] == "2 of 10 classes in 576 inspected labels, from 75 % (class 0) to 25 % (class 3)"


def test_the_summary_has_no_sentence_about_data_that_were_not_inspected():
    assert summary(training()) == {}
