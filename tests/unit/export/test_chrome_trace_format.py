"""The trace format: whatever is put in, viewers can show all of it."""

import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrome_traces import valid
from sonde.errors import SondeError
from sonde.export.chrome_trace_format import LONGEST_NAME, Times, Trace, compressed, in_lanes


def document(trace):
    return json.loads(trace.encoded())


def of_kind(trace, phase):
    return [event for event in document(trace)["traceEvents"] if event["ph"] == phase]


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e4)), max_size=40))
def test_spans_that_cross_get_tracks_of_their_own_and_none_is_lost(times):
    trace = Trace()
    pid = trace.process("p")
    tracks = {}
    for lane, span, number in in_lanes((Times(*each), number) for number, each in enumerate(times)):
        if lane not in tracks:
            tracks[lane] = trace.track(pid, f"lane {lane}")
        trace.span(tracks[lane], str(number), span)
    events = valid(document(trace))
    assert sorted(event["name"] for event in events if event["ph"] == "X") == sorted(map(str, range(len(times))))


def test_what_is_nested_stays_on_one_track():
    spans = [(Times(0, 10), "outer"), (Times(0, 4), "first"), (Times(4, 6), "second"), (Times(10, 1), "next")]
    assert {lane for lane, _, _ in in_lanes(spans)} == {0}


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_a_number_that_is_not_finite_is_an_instant_that_says_so(value, word):
    trace = Trace()
    track = trace.track(trace.process("p"), "steps")
    trace.counter(track, "loss", 5.0, value)
    (event,) = of_kind(trace, "i")
    assert (event["name"], event["ts"], event["args"]) == (f"loss is {word}", 5.0, {"value": word})
    assert not of_kind(trace, "C")
    valid(document(trace))


def test_names_cannot_command_a_terminal_and_are_not_endless():
    trace = Trace()
    track = trace.track(trace.process("evil \x1b[31m"), "\u202esteps")
    trace.span(track, "x" * 5000, Times(0, 1))
    names = [event["args"]["name"] for event in of_kind(trace, "M") if "name" in event["args"]]
    assert names == ["evil \\x1b[31m", "\\u202esteps"]
    assert len(of_kind(trace, "X")[0]["name"]) == LONGEST_NAME


def test_two_processes_never_share_a_thread_number():
    trace = Trace()
    tids = {trace.track(trace.process(str(number)), "steps").tid for number in range(3)}
    assert len(tids) == 3


def test_the_suffix_tells_whether_a_trace_is_compressed():
    trace = Trace({"run": "base"})
    assert gzip.decompress(compressed(trace, Path("x.json.gz"))) == compressed(trace, Path("x.json")) == trace.encoded()
    with pytest.raises(SondeError, match=r"x\.pb ends in none of \.json, \.json\.gz"):
        compressed(trace, Path("x.pb"))
