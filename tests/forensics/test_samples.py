"""Which samples are to blame, asked of batches whose culprits are known."""

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from sonde.replay.failing_samples import culprits


@given(st.integers(2, 500).flatmap(lambda num: st.tuples(st.just(num), st.integers(0, num - 1))))
def test_one_bad_sample_is_found_in_about_twice_the_logarithm(case):
    num, bad = case
    trials = []

    def fails(group):
        trials.append(group)
        return bad in group

    assert culprits(num, fails).samples == (bad,)
    assert len(trials) <= 2 * ceil(log2(num)) + 4


def test_several_bad_samples_are_all_found():
    assert culprits(64, lambda group: bool({3, 17, 40} & set(group))).samples == (3, 17, 40)


def test_a_failure_that_takes_two_samples_is_the_whole_batch():
    told = culprits(16, lambda group: {2, 13} <= set(group))
    assert told.samples == ()
    assert told.note


def test_a_failure_of_every_sample_blames_none():
    told = culprits(32, lambda group: True)
    assert told.samples is None
    assert "not to blame" in told.note


def test_a_sample_that_cannot_run_alone_is_run_in_good_company():
    def fails(group):
        if len(group) < 2:
            raise ValueError("Expected more than 1 value per channel")
        return 5 in group

    assert culprits(8, fails).samples == (5,)


def test_parts_that_cannot_run_are_said_to():
    def fails(group):
        raise RuntimeError("shapes do not match")

    told = culprits(8, fails)
    assert told.samples is None
    assert "shapes do not match" in told.note


def test_a_batch_of_one_is_not_searched():
    assert culprits(1, lambda group: True).samples is None


def test_of_many_bad_samples_in_every_part_of_a_batch_some_are_named():
    bad = set(range(0, 128, 9))
    told = culprits(128, lambda group: bool(bad & set(group)))
    assert told.samples
    assert set(told.samples) <= bad
    assert "some of the samples" in told.note


def test_six_of_eight_are_six_and_not_all():
    bad = {0, 2, 3, 5, 6, 7}
    assert culprits(8, lambda group: bool(bad & set(group))).samples == tuple(sorted(bad))


def test_a_sample_that_does_it_only_among_others_is_found_in_good_company():
    assert culprits(32, lambda group: 20 in group and len(group) > 1).samples == (20,)


def test_a_sum_that_takes_many_samples_blames_no_single_one():
    told = culprits(64, lambda group: len(group) >= 4)
    assert told.samples == ()
    assert "several" in told.note or "no part" in told.note
