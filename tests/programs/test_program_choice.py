"""The choice of the programs that CI runs: as many whatever the seed, and all of them in turn."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet

from program_choice import SEED, one_in, seed

NAMES = [f"{number}.py" for number in range(100)]


def chosen(names: list[str], number: int, **options: object) -> list[str]:
    return [each for each in one_in(number, names, **options) if not isinstance(each, ParameterSet)]


@pytest.mark.parametrize(("number", "share"), [(1, 100), (7, 15), (14, 8), (200, 1)])
def test_as_many_programs_are_chosen_whatever_the_seed(number, share, monkeypatch):
    for each in range(20):
        monkeypatch.setenv(SEED, str(each))
        assert len(chosen(NAMES, number)) == share
        assert len(chosen(NAMES, number, always={"3.py"})) == share


def test_all_programs_have_their_turn_and_some_are_always_chosen(monkeypatch):
    choices = []
    for each in range(100):
        monkeypatch.setenv(SEED, str(each))
        choices.append(chosen(NAMES, 14, always={"3.py"}))
    assert {name for choice in choices for name in choice} == set(NAMES)
    assert all("3.py" in choice for choice in choices)
    assert chosen(NAMES, 14, always={"3.py"}) == choices[-1]


def test_a_program_that_must_be_chosen_exists():
    with pytest.raises(ValueError, match=r"no\.py"):
        one_in(7, NAMES, always={"no.py"})


def test_without_git_the_seed_is_fixed(monkeypatch):
    monkeypatch.delenv(SEED)
    monkeypatch.setenv("PATH", "")
    assert seed() == "0"
