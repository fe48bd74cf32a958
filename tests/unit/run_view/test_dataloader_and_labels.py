"""The loader that feeds the training, the batches that were inspected, and their labels."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.events import Event
from sonde.run_view.dataloader_and_labels import MAX_LABELS, LabelCounts
from synthetic_steps import fed, loader, opening, some_labels, training, view_of

FORWARD = Event("source", 0, {"call": "forward", "line": "train.py:19", "text": "out = model(x)"})


def every_step(step):
    return True


def with_loaders(*events):
    return training(5, start=list(events))


def inspected(*events):
    """A step for each, with one event about its batch."""
    return training(len(events), events={step: [Event("data", step, data)] for step, data in enumerate(events)})


def batch(**given):
    return {"num_fetched": 1, "num_inputs": 1, "num_alike": 0, "size": 32, "sample": None, "labels": None} | given


# -- the loader ------------------------------------------------------------------------------------


def test_the_loader_of_the_training_is_the_last_one_before_the_first_forward():
    mean, own, validation = (loader(line=f"train.py:{line}", num_batches=line) for line in (1, 2, 3))
    with view_of(with_loaders(mean, own, FORWARD, validation)) as view:
        assert (view.training_loader.at, view.training_loader.num_batches) == (" at train.py:2", 2)


def test_a_loader_that_is_started_after_the_first_forward_counts_if_there_is_no_other():
    with view_of(with_loaders(FORWARD, loader(line="train.py:3"), loader(line="train.py:4"))) as view:
        assert view.training_loader.at == " at train.py:3"


def begins(step, index, **given):
    """A loader begins a pass; with its settings, as in the first one."""
    description = {"call": "loader", "line": f"train.py:{index}", "text": "", "order": "sequential", "batch_size": 32, "num_workers": 0}
    return Event("pass", step, {"loader": index, "num": 1, "num_batches": 10, "description": description | given})


def evaluates(*steps):
    return lambda step: {"eval_forwards": float(step in steps)}


def test_of_loaders_that_share_a_line_the_one_that_training_steps_follow_feeds_the_training():
    """A helper that iterates over either: the validation runs first and after each round."""
    events = {step: [begins(step, 7), begins(step, 8, order="random")] for step in (0, 10, 20)}
    with view_of(training(30, events=events, scalars=evaluates(0, 10, 20))) as view:
        assert (view.training_loader.at, view.training_loader.order) == (" at train.py:8", "random")


def test_a_validation_in_the_middle_of_a_pass_does_not_take_over_the_training():
    events = {0: [begins(0, 8)], 10: [begins(10, 7)], 20: [begins(20, 7)]}
    with view_of(training(100, events=events, scalars=evaluates(10, 20))) as view:
        assert view.training_loader.at == " at train.py:8"


def test_a_training_without_a_loader_is_not_fed_by_that_of_its_validation():
    steps = fed(training(30, events={10: [begins(10, 7)]}, scalars=evaluates(10)), data=lambda step: {"num_fetched": int(step == 10)})
    with view_of(steps) as view:
        assert (view.training_loader.at, view.training_loader.order) == ("", "")


def test_without_a_loader_nothing_is_known_of_it():
    with view_of(training(5)) as view:
        known = view.training_loader
        assert (known.num_batches, known.num_workers, known.batch_size, known.order, known.at, known.evidence()) == (0, 0, 0, "", "", {})


# -- inspected batches -----------------------------------------------------------------------------


def test_inspected_batches_are_columns_with_the_rows_of_their_steps():
    steps = fed(training(10, observed=lambda step: step % 3 == 0), data=lambda step: {"num_alike": 1, "sample": 70 + step, "size": 8})
    with view_of(steps) as view:
        batches = view.inspected_batches
        assert batches.rows.tolist() == [0, 3, 6, 9]
        assert batches.sample.tolist() == [70, 73, 76, 79]
        assert set(batches.size.tolist()) == {8}
        assert set(batches.num_alike.tolist()) == set(batches.num_fetched.tolist()) == {1}


def test_samples_that_differ_have_no_hash():
    with view_of(inspected(batch(sample=None))) as view:
        assert view.inspected_batches.sample.tolist() == [0]


def test_the_batch_of_a_step_that_was_not_completed_has_the_row_after_the_last():
    steps = training(4)
    steps.append(type(steps[0])(4, 0, {}, {}, (Event("data", 4, batch()),), steps[0].sites))
    with view_of(steps) as view:
        assert view.inspected_batches.rows.tolist() == [4]


def test_a_run_without_inspected_batches_has_empty_columns():
    with view_of(training(5)) as view:
        assert len(view.inspected_batches.rows) == len(view.inspected_batches.labels) == 0
        assert view.labels == LabelCounts()


# -- labels ----------------------------------------------------------------------------------------


def test_labels_are_columns_of_the_batches_whose_labels_are_known():
    known = some_labels({4: 20, 7: 12}, in_order=True)
    with view_of(inspected(batch(), batch(labels=known), batch(size=4, labels=known | {"is_learnt": False}))) as view:
        labels = view.inspected_batches.labels
        assert labels.rows.tolist() == [1, 2]
        assert (labels.num.tolist(), labels.num_classes.tolist(), labels.num_distinct.tolist()) == ([32, 32], [10, 10], [2, 2])
        assert labels.is_in_order.tolist() == [True, True]
        assert labels.is_per_sample.tolist() == [True, False]
        assert labels.is_learned.tolist() == [True, False]
        assert labels.counts[0].tolist() == [[4, 20], [7, 12]]


def test_a_condition_chooses_batches_with_their_counts():
    with view_of(inspected(*(batch(labels=some_labels({label: 32})) for label in range(4)))) as view:
        labels = view.inspected_batches.labels.where(np.array([False, True, False, True]))
        assert labels.rows.tolist() == [1, 3]
        assert [counts.tolist() for counts in labels.counts] == [[[1, 32]], [[3, 32]]]


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({"num": 0, "counts": [[1, 2]]}, id="no number"),
        pytest.param({"num": 32, "counts": []}, id="no counts"),
        pytest.param({"num": 32, "counts": "many"}, id="counts that are a text"),
        pytest.param({"num": 32, "counts": [1, [2], "34"]}, id="counts that are no pairs"),
        pytest.param({"num": 1e300, "counts": [[1, 2]]}, id="a number that no batch has"),
    ],
)
def test_labels_of_a_damaged_event_are_not_known(labels):
    with view_of(inspected(batch(labels=labels), batch(labels=some_labels({1: 32})))) as view:
        assert view.inspected_batches.rows.tolist() == [0, 1]
        assert view.inspected_batches.labels.rows.tolist() == [1]


def test_numbers_that_do_not_fit_into_a_column_are_zero():
    with view_of(inspected(batch(size=10**30, sample=1e300, labels={"num": 1, "counts": [[10**400, 1]]}))) as view:
        assert (view.inspected_batches.size.tolist(), view.inspected_batches.sample.tolist()) == ([0], [0])
        assert view.labels.totals == {0: 1}


def test_labels_are_counted_over_all_inspected_batches():
    steps = fed(training(4, observed=every_step), labels=lambda step: some_labels({0: 24, step: 8}, num_classes=5 + step))
    with view_of(steps) as view:
        assert view.labels.totals == {0: 80, 1: 8, 2: 8, 3: 8}
        assert (view.labels.num_batches, view.labels.num_classes) == (4, 8)
        assert view.labels.shares() == [80 / 104, 8 / 104, 8 / 104, 8 / 104]


def test_of_too_many_different_labels_the_first_are_counted():
    def vocabulary(step):
        return some_labels({100_000 - 64 * step - word: 1 for word in range(64)}, num_classes=100_000)

    num_batches = MAX_LABELS // 64 + 3
    with view_of(fed(training(num_batches, start=opening(), observed=every_step), labels=vocabulary)) as view:
        assert len(view.labels.totals) == MAX_LABELS
        assert max(view.labels.totals) == 100_000
        assert min(view.labels.totals) == 100_001 - MAX_LABELS
