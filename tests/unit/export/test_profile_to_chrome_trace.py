"""A profile as a trace: every call of every layer, in both directions. No torch."""

import json
from dataclasses import replace

import pytest

from chrome_traces import spans, valid
from sample_profiles import sample_profile
from sonde.errors import SondeError
from sonde.export.profile_to_chrome_trace import SAVED, trace_of_profile
from sonde.profiler import Span


@pytest.fixture(scope="module")
def events():
    return valid(json.loads(trace_of_profile(sample_profile()).encoded()))


def test_every_recorded_call_is_a_span_in_microseconds(events):
    report = sample_profile()
    for direction in ("forward", "backward"):
        recorded = sorted((span.start_ms, span.duration_ms) for span in report.spans if span.kind == direction)
        drawn = sorted((span["ts"] / 1e3, span["dur"] / 1e3) for span in spans(events, direction))
        assert drawn == [pytest.approx(each, abs=2e-6) for each in recorded]


def test_a_span_says_its_layers_class_and_arithmetic(events):
    span = next(span for span in spans(events, "backward") if span["name"].startswith("layers.0.up"))
    assert span["args"]["class"] == "Linear"
    assert span["args"]["FLOP per step"] == 12_000_000


def test_steps_hold_their_phases(events):
    first, second = spans(events, "step")
    phases = [phase["name"] for phase in spans(events, "phase") if phase["ts"] < first["ts"] + first["dur"]]
    assert phases == ["forward", "backward"]
    assert second["ts"] >= first["ts"] + first["dur"]


def test_what_is_kept_for_backward_rises_and_is_let_go_again(events):
    curve = [event["args"]["value"] for event in events if event["ph"] == "C" and event["name"] == SAVED]
    assert max(curve) == 6000  # six layers of a thousand bytes each
    assert curve[-1] == 0


def test_layers_of_another_thread_have_a_track_of_their_own():
    report = sample_profile()
    far = Span(0, "forward", "head", 0.5, 100.0, thread=7)  # would cross what the main thread does
    events = valid(json.loads(trace_of_profile(replace(report, spans=(*report.spans, far))).encoded()))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["steps", "layers", "layers, thread 7", "sections"]


def test_a_profile_without_spans_is_refused_with_what_to_do():
    with pytest.raises(SondeError, match=r"sonde profile -o trace\.json\.gz script\.py"):
        trace_of_profile(replace(sample_profile(), spans=()))
