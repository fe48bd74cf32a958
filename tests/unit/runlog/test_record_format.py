"""The bytes: what is encoded comes back, and what was not encoded by us is refused without harm."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.events import Site
from sonde.runlog import record_format as f


def payload(record):
    return record[f.RECORD_BYTES :]


def test_a_header_says_its_version_and_a_damaged_one_does_not():
    assert len(f.header()) == f.HEADER_BYTES
    assert f.version_of(f.header(3)) == 3
    for bit in range(8 * f.HEADER_BYTES):
        flipped = bytearray(f.header())
        flipped[bit // 8] ^= 1 << bit % 8
        assert f.version_of(bytes(flipped)) is None
    assert f.version_of(f.header()[:15]) is None


def test_a_frame_comes_back_as_columns():
    rows = np.arange(6.0).reshape(3, 2)
    frame = f.frame(payload(f.FramePlan("update", ("a", "b"), [7, 9, 2**32 - 1], exact=False).encode(12, 34, rows)))
    assert (frame.kind, frame.step, frame.fields) == ("update", 12, ("a", "b"))
    assert frame.sites.tolist() == [7, 9, 2**32 - 1]
    assert frame["b"].tolist() == [1, 3, 5]
    assert frame.values.dtype == np.float32


@pytest.mark.parametrize("value", [1e39, -1e300, 1e-46, -1e-300, 3.4028235677973366e38, 5e-324])
@pytest.mark.parametrize("other", [0.0, math.nan, math.inf, -math.inf])
def test_a_number_that_single_precision_would_lose_makes_the_frame_double(value, other):
    record = f.FramePlan("update", ("a", "b"), [0], exact=False).encode(0, 0, np.array([[value, other]]))
    assert f.frame(payload(record)).values.dtype == np.float64
    assert repr(f.frame(payload(record)).values[:, 0].tolist()) == repr([value, other])


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, -math.inf, 3.4e38, 1e-45, 1.0])
def test_a_number_that_survives_takes_four_bytes(value):
    record = f.FramePlan("update", ("a",), [0], exact=False).encode(0, 0, np.array([[value]]))
    back = f.frame(payload(record)).values
    assert back.dtype == np.float32
    assert repr(float(back[0, 0])) == repr(float(np.float32(value)))


def test_a_user_who_made_numpy_strict_gets_the_same_bytes():
    plan = f.FramePlan("update", ("a", "b"), [0], exact=False)
    for rows in (np.array([[1e-40, 1.0]]), np.array([[1e39, np.nan]])):
        usual = plan.encode(0, 0, rows)
        with np.errstate(all="raise"):
            assert plan.encode(0, 0, rows) == usual


def test_a_plan_refuses_rows_of_another_shape_and_fields_with_commas():
    with pytest.raises(f.FormatError):
        f.FramePlan("x", ("a",), [1], exact=False).encode(0, 0, np.zeros((1, 2)))
    with pytest.raises(f.FormatError):
        f.FramePlan("x", ("a,b",), [1], exact=False)


def test_a_frame_without_sites_or_fields_is_a_frame():
    assert f.frame(payload(f.FramePlan("x", ("a",), [], exact=False).encode(0, 0, np.zeros((0, 1))))).values.shape == (1, 0)
    assert f.frame(payload(f.FramePlan("x", (), [1], exact=True).encode(0, 0, np.zeros((1, 0))))).values.shape == (0, 1)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_format_error(data):
    for decode in (f.frame, f.layout, f.event, f.sites, f.gap, f.parse_json, f.frame_head, f.step_and_constant_part):
        try:
            decode(data)
        except f.FormatError:
            pass


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(
    inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "kind", "path", "shape", "step", "data", "model", "call",
                                                          "num_dropped", "first_step", "last_step"]), inner), max_leaves=20))
def test_any_json_is_a_value_or_a_format_error(content):
    for decode in (f.event, f.sites, f.gap):
        for value in (content, [content]):
            try:
                decode(f._json(value))
            except f.FormatError:
                pass


def test_json_nested_without_end_is_a_format_error():
    with pytest.raises(f.FormatError):
        f.parse_json(b"[" * 200_000)


def test_a_site_of_a_later_version_is_read_without_what_is_new():
    data = b'[{"id": 3, "kind": "output", "path": "a", "colour": "red", "model": 7}]'
    assert f.sites(data) == [Site(3, "output", "a")]


def test_long_names_are_capped_and_stay_distinct():
    first, second = "x" * 100_000 + "1", "x" * 100_000 + "2"
    assert len(f.capped(first)) == f.MAX_NAME
    assert f.capped(first) != f.capped(second)
    assert f.capped(first).startswith("x" * 900)
    assert f.capped("x" * f.MAX_NAME) == "x" * f.MAX_NAME
    assert f.sites(payload(f.sites_records([Site(1, "output", first)])[0]))[0].path == f.capped(first)


def test_event_data_of_any_kind_becomes_plain_and_bounded():
    class Odd:
        def __str__(self):
            return "odd"

    endless = []
    endless.append(endless)
    data = {"t": (1, 2), 3: np.float32(0.5), "i": np.int64(7), "o": Odd(), "n": None, "b": 10**5000, "e": endless,
            "name": "y" * 5000, "text": "z" * 5000}
    event, time_ns = f.event(payload(f.event_record("k", -1, 5, data)))
    assert (event.kind, event.step, time_ns) == ("k", -1, 5)
    assert (event.data["t"], event.data["3"], event.data["i"], event.data["o"]) == ([1, 2], 0.5, 7, "odd")
    assert len(event.data["name"]) == f.MAX_NAME
    assert event.data["text"] == "z" * 5000
    assert event.data["b"].startswith("0x")


def test_fifty_thousand_long_names_fit_into_records():
    records = f.sites_records([Site(i, "parameter", f"{i}" + "é" * 2000) for i in range(3000)])
    assert len(records) == 3
    assert sum(len(f.sites(payload(record))) for record in records) == 3000


def test_a_record_longer_than_any_reader_accepts_is_refused():
    with pytest.raises(f.FormatError):
        f.record(f.EVENT, bytes(f.MAX_PAYLOAD + 1))
    with pytest.raises(f.FormatError):
        f.FramePlan("x", ("a",) * 2, np.zeros(f.MAX_PAYLOAD // 8, np.uint32), exact=False)
