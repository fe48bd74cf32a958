"""Pictures as files: every format, the same bytes each time, nothing in them that could act."""

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from sonde.errors import SondeError
from sonde.render import plots
from sonde.render.html.html_page import POLICY
from sonde.render.plots.plot import plots_page
from sonde.render.safe_write import file_name

EVIL = """<script>alert(1)</script>"'--><img src=x onerror=alert(1)>"""
BAD = [1.0, 2.0, math.nan, math.inf, -math.inf]


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    handle_startendtag = handle_starttag


def pictures(name="weights"):
    matrix = np.array([[1.0, math.nan], [2.0, 3.0]])
    return [
        plots.distribution(BAD, name=name, unit=name),
        plots.gradient_flow([1, 2], {name: [1.0, math.inf], "b": [1.0, 2.0]}, name=name),
        plots.layer_heatmap([name, "b"], [1, 2], matrix, name=name, label=name),
        plots.heatmap(matrix, name=name, x_label=name, y_label=name, label=name),
        plots.histograms({name: BAD, "b": [1.0]}, name=name),
    ]


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("html", b"<!doctype html>"), ("json", b"{")]
)
def test_the_suffix_names_the_format(tmp_path, suffix, start):
    for number, plot in enumerate(pictures()):
        path = plot.save(tmp_path / "new" / "folder" / f"{number}.{suffix}")
        assert path.read_bytes().startswith(start)


def test_a_picture_replaces_an_older_one_of_its_name(tmp_path):
    first = plots.distribution([1.0], name="a").save(str(tmp_path / "a.svg"))
    before = first.read_bytes()
    assert plots.distribution([1.0, 2.0], name="a").save(tmp_path / "a.svg").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


@pytest.mark.parametrize(("name", "said"), [("a.jpeg", "'jpeg' is no format"), ("a", "no suffix"), ("a.", "no suffix")])
def test_a_format_that_is_not_known_is_refused(tmp_path, name, said):
    with pytest.raises(SondeError, match=said):
        plots.distribution([1.0]).save(tmp_path / name)


def test_a_path_that_cannot_be_written_is_a_letter(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SondeError, match="cannot be made"):
        plots.distribution([1.0]).save(tmp_path / "file" / "a.png")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(SondeError, match="is a directory"):
        plots.distribution([1.0]).save(tmp_path / "b.png")


def test_json_is_strict_and_keeps_bad_numbers():
    def refuse(word):
        raise AssertionError(word)

    text = plots.gradient_flow([1, 2, 3], [1.0, math.nan, -math.inf], name="flow").to_json()
    data = json.loads(text, parse_constant=refuse)
    assert data["norms"] == {"": [1.0, "NaN", "-Infinity"]}
    assert data["non_finite"] == {"NaN": 1, "-Infinity": 1}
    for plot in pictures():
        json.loads(plot.to_json(), parse_constant=refuse)


def test_the_data_of_a_picture_are_plain_numbers():
    assert pictures()[2].data["values"][1] == [2.0, 3.0]
    assert type(pictures()[1].data["norms"]["weights"]) is list


def test_every_process_writes_the_same_bytes(tmp_path):
    code = (
        "import sys, math; from sonde.render import plots\n"
        "plot = plots.layer_heatmap(['a', 'b'], [1, 2], [[1.0, math.nan], [2.0, 3.0]], name='m', label='norm')\n"
        "for suffix in ('png', 'svg', 'pdf', 'html', 'json'): plot.save(f'{sys.argv[1]}/x.{suffix}')\n"
    )
    for folder, seed in (("one", "1"), ("two", "2")):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / folder)], env=os.environ | {"PYTHONHASHSEED": seed}, check=True)
    for suffix in plots.FORMATS:
        assert (tmp_path / "one" / f"x.{suffix}").read_bytes() == (tmp_path / "two" / f"x.{suffix}").read_bytes()


def test_svg_is_well_formed_and_its_text_can_be_searched():
    for plot in pictures(EVIL):
        root = ElementTree.fromstring(plot.render("svg").decode())
        texts = ["".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert any(text.startswith("<script>alert(1)") for text in texts)
        assert not list(root.iter("{http://www.w3.org/2000/svg}script"))


PAGES = {
    "file": lambda plot: plot.render("html").decode(),
    "notebook": lambda plot: plot._repr_html_(),
    "dashboard": lambda plot: plots_page([plot, plot]),
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_hostile_name_stays_text_in_html(page):
    for plot in pictures(EVIL):
        tags = Tags(page(plot))
        assert not {"script", "img", "iframe", "object", "link"} & set(tags.tags)
        assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "src"]
        targets = [value for name, value in tags.attributes if name in ("href", "xlink:href")]
        assert all(value.startswith(("#", "data:image/png;base64,")) for value in targets)


def test_a_page_says_that_nothing_may_be_loaded_or_executed():
    tags = Tags(plots.distribution(BAD).render("html").decode())
    assert ("content", POLICY) in tags.attributes
    assert "script-src" not in POLICY
    assert POLICY.startswith("default-src 'none'")


def test_a_page_is_drawn_in_the_colours_of_the_page_light_or_dark():
    text = plots.distribution(BAD).to_html()
    assert "var(--ink)" in text
    assert "var(--error)" in text
    assert "#1d1f24" not in text
    assert "var(" not in plots.distribution(BAD)._repr_html_()  # a notebook does not have these names


def test_a_changed_figure_is_what_is_saved():
    plot = plots.distribution([1.0], name="a")
    plot.figure.axes[0].set_ylabel("changed by hand")
    assert b"changed by hand" in plot.render("svg")


def test_a_dashboard_has_a_table_of_contents_and_every_picture_once():
    page = plots_page([plots.distribution([1.0], name="first"), plots.distribution([2.0], name="second & third")])
    tags = Tags(page)
    assert [value for name, value in tags.attributes if name == "href"] == ["#plot1", "#plot2"]
    assert [value for name, value in tags.attributes if name == "id" and value.startswith("plot")] == ["plot1", "plot2"]
    assert tags.tags.count("svg") == 2
    assert "second &amp; third" in page


def test_pictures_on_one_page_share_no_ids():
    same = [plots.layer_heatmap(["a"], [1, 2], [[1.0, math.nan]], name=name, label="norm") for name in ("first", "second")]
    ids = [value for name, value in Tags(plots_page(same)).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_one_bad_picture_does_not_cost_the_others(caplog):
    def draw(figure):
        raise ZeroDivisionError("no <b>luck</b>")

    page = plots_page([plots.Plot("broken", draw, data={}), plots.distribution([1.0], name="good")])
    assert "This picture could not be drawn: no &lt;b&gt;luck" in page
    assert Tags(page).tags.count("svg") == 1
    assert "broken" in caplog.text


# ---- file names


def test_a_name_that_can_be_kept_is_kept():
    assert file_name("encoder.0.weight", "png") == "encoder.0.weight.png"


ODD = ["../../etc/passwd", "layer/0 weird:name", "..", "", "/", "a\x00b", "CON", "nul.txt", "\ud800", "x" * 900, ".hidden", "编" * 300]


@pytest.mark.parametrize("name", ODD)
def test_no_name_leaves_its_folder_or_fails(name, tmp_path):
    path = tmp_path / file_name(name, "svg")
    path.write_text("")
    assert path.resolve().parent == tmp_path.resolve()
    assert not path.name.startswith((".", "CON.", "nul."))


def test_different_names_never_share_a_file():
    names = ["a/b", "a b", "a:b", "a_b", "A_b", "a_B", "../a_b", "a_b."]
    assert len({file_name(name, "png").lower() for name in names}) == len(names)
    assert file_name("a/b", "png") == file_name("a/b", "png")


def test_a_reserved_name_is_not_given():
    assert file_name("dashboard", "html", reserved=("dashboard.html",)) != "dashboard.html"
