"""Which samples are to blame, asked of batches whose culprits are known."""

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from sonde.forensics.samples import culprits


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
