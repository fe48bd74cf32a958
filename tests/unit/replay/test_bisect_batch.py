"""The samples that make a step fail, or that make a number too large, are found in batches in which they are known."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.replay.bisect_batch import find_failing_samples, find_heaviest_samples

# ---- samples that fail


@given(st.integers(2, 500).flatmap(lambda num: st.tuples(st.just(num), st.integers(0, num - 1))))
def test_one_failing_sample_is_found_in_about_twice_the_logarithm_of_the_batch(case):
    num, bad = case
    trials = []

    def fails(group):
        trials.append(group)
        return bad in group

    assert find_failing_samples(num, fails).samples == (bad,)
    assert len(trials) <= 2 * ceil(log2(num)) + 4


def test_several_failing_samples_are_all_found():
    assert find_failing_samples(64, lambda group: bool({3, 17, 40} & set(group))).samples == (3, 17, 40)


def test_a_failure_that_takes_two_samples_is_attributed_to_the_whole_batch():
    found = find_failing_samples(16, lambda group: {2, 13} <= set(group))
    assert found.samples == ()
    assert found.note


def test_a_failure_of_every_sample_is_attributed_to_none():
    found = find_failing_samples(32, lambda group: True)
    assert found.samples is None
    assert "not to blame" in found.note


def test_a_sample_that_cannot_run_alone_is_run_with_good_samples():
    def fails(group):
        if len(group) < 2:
            raise ValueError("Expected more than 1 value per channel")
        return 5 in group

    assert find_failing_samples(8, fails).samples == (5,)


def test_parts_of_the_batch_that_cannot_run_are_noted():
    def fails(group):
        raise RuntimeError("shapes do not match")

    found = find_failing_samples(8, fails)
    assert found.samples is None
    assert "shapes do not match" in found.note


def test_a_batch_of_one_is_not_searched():
    assert find_failing_samples(1, lambda group: True).samples is None


def test_of_many_failing_samples_in_every_part_of_a_batch_some_are_named():
    bad = set(range(0, 128, 9))
    found = find_failing_samples(128, lambda group: bool(bad & set(group)))
    assert found.samples
    assert set(found.samples) <= bad
    assert "some of the samples" in found.note


def test_six_of_eight_samples_are_six_and_not_all():
    bad = {0, 2, 3, 5, 6, 7}
    assert find_failing_samples(8, lambda group: bool(bad & set(group))).samples == tuple(sorted(bad))


def test_a_sample_that_fails_only_among_others_is_found_with_good_samples():
    assert find_failing_samples(32, lambda group: 20 in group and len(group) > 1).samples == (20,)


def test_a_failure_that_takes_many_samples_is_attributed_to_no_single_one():
    found = find_failing_samples(64, lambda group: len(group) >= 4)
    assert found.samples == ()
    assert "several" in found.note or "no part" in found.note


# ---- samples that make a number too large


class Batch:
    """The contribution of each sample to the number; counts the calls."""

    def __init__(self, **heavy):
        self.num, self.weights, self.num_calls = heavy.pop("num", 64), {int(name[1:]): weight for name, weight in heavy.items()}, 0

    def __call__(self, group):
        self.num_calls += 1
        return sum(self.weights.get(sample, 0.01) for sample in group)

    @property
    def excess(self):
        return sum(self.weights.get(sample, 0.01) for sample in range(self.num))


def heaviest(batch, **more):
    return find_heaviest_samples(batch.num, batch.excess, batch, **more)


def test_one_heavy_sample_is_found_in_a_few_trials():
    batch = Batch(_37=100.0)
    found = heaviest(batch)
    assert found.samples == (37,)
    assert found.shares == pytest.approx((1.0,), abs=0.01)
    assert batch.num_calls <= 14


def test_the_heaviest_sample_comes_first():
    assert heaviest(Batch(_3=10.0, _50=80.0, _22=30.0)).samples == (50, 22, 3)


def test_a_batch_that_is_heavy_as_a_whole_has_no_heavy_samples():
    assert heaviest(Batch(**{f"_{sample}": 5.0 for sample in range(64)})).samples == ()


def test_the_search_in_a_large_batch_without_heavy_samples_ends_in_time():
    batch = Batch(num=4096)
    assert heaviest(batch).samples == ()
    assert batch.num_calls < 150


def test_a_batch_that_cannot_be_divided_is_noted_with_the_reason():
    def refuses(group):
        raise ValueError("expected more than 1 value per channel")

    found = find_heaviest_samples(8, 10.0, refuses)
    assert found.samples is None
    assert "more than 1 value" in found.note


def test_samples_that_are_heavy_only_together_are_not_named():
    def together(group):
        return 0.0

    found = find_heaviest_samples(16, 10.0, together)
    assert found.samples is None
    assert "both" in found.note


def test_the_search_ends_when_the_model_takes_too_long():
    found = heaviest(Batch(_5=50.0), max_s=0.0)
    assert found.samples is None
    assert "no time" in found.note


@pytest.mark.parametrize("num", [0, 1])
def test_a_batch_of_at_most_one_has_no_heaviest_sample(num):
    assert find_heaviest_samples(num, 1.0, lambda group: 1.0).samples is None
