"""A curve as SVG: well-formed whatever the values, and bad numbers leave a mark."""

import math
import re
import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from sonde.render.html.svg_chart import HEIGHT, WIDTH, ChartLine, line_chart


@given(st.lists(st.floats(), min_size=1, max_size=60))
def test_any_values_give_a_drawing_inside_its_frame(values):
    drawing = line_chart([ChartLine(list(range(len(values))), values)], name="loss")
    assert "nan" not in drawing
    assert "inf" not in drawing
    root = ElementTree.fromstring(drawing)
    for points in root.iter("polyline"):
        for pair in points.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert -1 <= y <= HEIGHT + 1
    num_bad = sum(not math.isfinite(value) for value in values)
    assert bool(num_bad) == any(rect.attrib["class"] == "bad" for rect in root.iter("rect"))


def test_a_bad_number_interrupts_the_curve_and_is_named():
    drawing = line_chart([ChartLine([0, 1, 2, 3, 4], [1.0, 2.0, math.nan, 2.0, 1.0])], name="loss")
    assert drawing.count("<polyline") == 2
    assert "NaN from step 2" in drawing


def test_a_name_is_escaped():
    assert '"><script>' not in line_chart([ChartLine([0, 1], [1.0, 2.0])], name='"><script>')


def test_no_values_give_no_drawing():
    assert line_chart([ChartLine([], [])], name="loss") == ""


def test_the_axis_names_the_first_and_the_last_step():
    assert re.search(r"step 10<.*step 90<", line_chart([ChartLine([10, 50, 90], [1.0, 2.0, 3.0])], name="loss"))
