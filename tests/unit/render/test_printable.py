"""Untrusted text keeps its letters and loses its commands."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.formatting import printable


@pytest.mark.parametrize("text", ["encoder.layer.0", "größe", "层.weight", "a b", "✓ ▁▂▃", "\\x1b written by hand", ""])
def test_text_with_a_shape_is_left_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("del\x7f", "del\\x7f"),
        ("back\x08space", "back\\x08space"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\u2066isolate\u2069", "\\u2066isolate\\u2069"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("lone\ud800", "lone\\ud800"),
        ("nul\0", "nul\\x00"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("two\nlines\r", "two\\x0alines\\x0d"),
    ],
)
def test_what_a_terminal_could_obey_or_hide_is_written_out(text, shown):
    assert printable(text) == shown


def test_line_breaks_stay_where_lines_are_wanted():
    assert printable("a\nb\rc", lines=True) == "a\nb\\x0dc"


@given(st.text())
def test_no_control_format_or_surrogate_character_survives(text):
    shown = printable(text, lines=True)
    assert not [char for char in shown if char != "\n" and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}]
    shown.encode("utf-8")  # and it can always be written
