"""Reading the local variables of a running function keeps nothing alive, and takes nothing from anybody."""

from __future__ import annotations

import sys
import weakref

import pytest

pytest.importorskip("torch")

from sonde.capture.step_phase_timer import PhaseTimer
from sonde.capture.step_profiler.line_times import LineTimes
from sonde.capture.user_source_line import read_locals

pytestmark = pytest.mark.torch


class Thing:
    pass


def test_a_variable_that_was_read_dies_when_the_function_deletes_it():
    thing = Thing()
    alive = weakref.ref(thing)
    assert read_locals(sys._getframe())["thing"] is thing
    del thing
    assert alive() is None


def test_a_dictionary_of_locals_that_the_user_holds_stays_as_it_is():
    number = 7
    held = locals()
    assert read_locals(sys._getframe())["number"] == number
    assert held["number"] == 7


def test_the_variables_of_a_traced_step_die_with_the_next():
    times = LineTimes(PhaseTimer({}, is_recorded=True))
    alive = None
    for number in range(2):
        thing = Thing()
        if number == 0:
            alive = weakref.ref(thing)
            assert times.start()
            assert thing is not None
            assert times.stop()
    assert alive() is None
    assert number == 1
    assert thing is not None


def test_the_dictionary_that_locals_gave_the_user_is_not_changed() -> None:
    first = 1
    config = locals()
    second = first + 1
    found = read_locals(sys._getframe())
    assert (found["first"], found["second"]) == (1, second)
    assert config == {"first": 1}
    assert read_locals(sys._getframe())["config"] is config
    assert config == {"first": 1}


def test_the_variables_of_a_function_without_locals_are_not_kept_alive_by_reading_them_twice() -> None:
    class Thing:
        pass

    def reader() -> weakref.ref[Thing]:
        thing = Thing()
        for _ in range(2):
            assert read_locals(sys._getframe())["thing"] is thing
        ref = weakref.ref(thing)
        del thing
        return ref

    assert reader()() is None
