"""Questions about columns, each compared with its definition in plain Python."""

from __future__ import annotations

from itertools import groupby
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.rules.column_helpers import (
    Streak,
    first_number,
    first_streak,
    first_where,
    largest_number,
    last_number,
    last_streak,
    streaks,
)

ENTRIES = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30)  # condition, among


def bools(text: str) -> np.ndarray:
    return np.array([letter == "x" for letter in text], bool)


def streaks_by_definition(condition, among):
    relevant = [(index, condition[index]) for index in range(len(condition)) if among[index]]
    groups = [[index for index, _ in group] for holds, group in groupby(relevant, key=lambda each: each[1]) if holds]
    return [Streak(group[0], group[-1] + 1) for group in groups]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [("", []), (".", []), ("x", [(0, 1)]), ("xx.x", [(0, 2), (3, 4)]), ("..xx..", [(2, 4)]), ("xxx", [(0, 3)])],
)
def test_streaks_are_entries_in_a_row(condition, expected):
    assert streaks(bools(condition)) == expected


def test_entries_that_do_not_matter_neither_end_a_streak_nor_belong_to_its_ends():
    #                  micro-batches between updates: only every second entry is an update
    assert streaks(bools(".x.x..."), among=bools(".x.x.x.")) == [Streak(1, 4)]
    assert streaks(bools("xxxxx"), among=bools(".x.x.")) == [Streak(1, 4)]
    assert Streak(1, 4).length == 3


@given(ENTRIES)
def test_streaks_follow_their_definition(entries):
    condition, among = (np.array([entry[part] for entry in entries], bool) for part in (0, 1))
    assert streaks(condition, among) == streaks_by_definition(condition.tolist(), among.tolist())
    found = streaks(condition, among)
    relevant = np.flatnonzero(among)
    at_end = found[-1] if found and condition[relevant[-1]] else None
    assert last_streak(condition, among) == at_end


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), st.integers(1, 6))
def test_the_first_streak_follows_its_definition(entries, limit):
    counts, among = np.array([entry[0] for entry in entries], int), np.array([entry[1] for entry in entries], bool)
    found = streaks_by_definition((counts != 0).tolist(), (among | (counts != 0)).tolist())
    expected = next((each for each in found if counts[each.start : each.stop].sum() >= limit), None)
    assert first_streak(counts, sum_at_least=limit, among=among) == expected


def test_the_first_streak_counts_amounts_not_entries():
    assert first_streak(np.array([0, 1, 0, 2, 1, 0, 9]), sum_at_least=3) == Streak(3, 5)
    assert first_streak(np.array([1, 1, 0, 1]), sum_at_least=3) is None
    assert first_streak(np.array([1, 1, 0, 1]), sum_at_least=3, among=bools("xx.x")) == Streak(0, 4)
    assert first_streak(np.array([], int), sum_at_least=1) is None


def test_a_nan_spoils_its_own_streak_only():
    assert first_streak(np.array([5.0, nan, 0.0, 2.0, 2.0]), sum_at_least=4) == Streak(3, 5)


def test_the_last_streak_reaches_the_end():
    assert last_streak(bools("x.xx")) == Streak(2, 4)
    assert last_streak(bools("xxxx")) == Streak(0, 4)
    assert last_streak(bools("xxx.")) is None
    assert last_streak(bools("")) is None
    assert last_streak(bools("xx.."), among=bools("xx..")) == Streak(0, 2)
    assert last_streak(bools("xx"), among=bools("..")) is None


def test_the_first_entry_for_which_a_condition_holds():
    assert first_where(bools("..x.x")) == 2
    assert first_where(bools("...")) is None
    assert first_where(bools("")) is None


def test_numbers_skip_nan_and_keep_infinity():
    column = np.array([nan, 2.0, inf, 1.0, nan])
    assert (first_number(column), last_number(column), largest_number(column)) == (2.0, 1.0, inf)
    assert first_number(np.array([-inf, 1.0])) == -inf


@pytest.mark.parametrize("column", [[], [nan], [nan, nan]])
def test_without_a_number_the_answer_is_nan(column):
    assert all(isnan(question(np.array(column, float))) for question in (first_number, last_number, largest_number))
