"""A canvas of dots, character by character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.render.terminal.braille_canvas import BrailleCanvas


def drawn(*dots, width=1, height=1, unicode=True):
    canvas = BrailleCanvas(width, height, unicode=unicode)
    for dot in dots:
        canvas.dot(*dot)
    return canvas.rows()


@pytest.mark.parametrize(
    ("dot", "char"),
    [((0, 0), "⠁"), ((0, 1), "⠂"), ((0, 2), "⠄"), ((0, 3), "⡀"), ((1, 0), "⠈"), ((1, 1), "⠐"), ((1, 2), "⠠"), ((1, 3), "⢀")],
)
def test_each_dot_of_a_character_is_the_dot_of_braille(dot, char):
    assert drawn(dot) == [char]


def test_all_dots_fill_the_character_and_none_leaves_a_blank():
    assert drawn(*((x, y) for x in range(2) for y in range(4))) == ["⣿"]
    assert drawn() == [" "]


def test_dots_of_neighbours_are_in_neighbouring_characters():
    assert drawn((0, 0), (2, 0), (0, 4), width=2, height=2) == ["⠁⠁", "⠁ "]


def test_a_line_reaches_both_of_its_ends():
    canvas = BrailleCanvas(2, 1)
    canvas.line(0, 3, 3, 0)
    assert canvas.rows() == ["⡠⠊"]
    canvas = BrailleCanvas(2, 1)
    canvas.line(3, 0, 0, 3)
    assert canvas.rows() == ["⡠⠊"]


def test_a_line_to_its_own_beginning_is_a_dot():
    canvas = BrailleCanvas(1, 1)
    canvas.line(1, 2, 1, 2)
    assert canvas.rows() == ["⠠"]


def test_a_mark_stands_in_the_place_of_dots():
    canvas = BrailleCanvas(3, 1)
    canvas.line(0, 0, 5, 0)
    canvas.mark(1, 0, "✗")
    assert canvas.rows() == ["⠉✗⠉"]


@pytest.mark.parametrize(("row", "char"), [(0, "'"), (1, "-"), (2, "-"), (3, ".")])
def test_without_braille_a_character_says_at_what_height_its_dot_is(row, char):
    assert drawn((0, row), unicode=False) == [char]


@given(st.lists(st.tuples(st.integers(-20, 40), st.integers(-20, 40)), max_size=30), st.booleans())
def test_whatever_is_drawn_the_canvas_keeps_its_size(points, unicode):
    canvas = BrailleCanvas(7, 3, unicode=unicode)
    for x, y in points:
        canvas.line(0, 0, x, y)
        canvas.mark(x, y, "x")
    rows = canvas.rows()
    assert [len(row) for row in rows] == [7, 7, 7]
    assert unicode or all(row.isascii() for row in rows)
