"""Two runs side by side: the terminal, the page and Markdown say the same, at any width, whatever the names are."""

import io
import math
from html.parser import HTMLParser

import pytest
from rich.console import Console

from comparison_runs import falling, write_pair_run
from sonde.comparison.compare import compare
from sonde.events import Kind
from sonde.render.html.comparison_html import comparison_html
from sonde.render.html.svg_chart import ChartLine, line_chart
from sonde.render.report_markdown import comparison_markdown
from sonde.render.terminal.comparison_terminal import TerminalComparison

EVIL = """<script>alert(1)</script>"'`|*_[x](https://evil.example)\x1b[31m"""
LOSSES = falling(120, 0.02)


def on_paper(comparison, width=100, **options):
    paper = io.StringIO()
    Console(file=paper, width=width, highlight=False, **options).print(TerminalComparison(comparison))
    return paper.getvalue()


@pytest.fixture
def different(tmp_path):
    changes = {(50, Kind.ACTIVATION, "head"): {"mean": 0.7}}
    scalars = {"step_ms": 20.0, "backward_ms": 15.0, "peak_bytes": 2e9}
    worse = [2 * loss if step > 50 else loss for step, loss in enumerate(LOSSES)]
    a = write_pair_run(tmp_path / "2026-11-16_03-24-21_train_4c1f", LOSSES, scalars={"peak_bytes": 1e9}, logged={"accuracy": [0.5] * 120})
    b = write_pair_run(
        tmp_path / "2026-11-16_03-31-07_train_77ab", worse, scalars=scalars, changes=changes, layers=("encoder", "middle", "head", "new"),
        about={"argv": ["train.py", "--lr", "0.5"], "threads": 4}, logged={"accuracy": [0.25] * 120},
    )  # fmt: skip
    return compare(a, b)


@pytest.fixture
def evil(tmp_path):
    about = {"argv": ["train.py", f"--{EVIL}", EVIL], EVIL: EVIL}
    a = write_pair_run(tmp_path / "a", LOSSES, layers=(EVIL, "head"), logged={EVIL: [1.0] * 120})
    b = write_pair_run(
        tmp_path / "b", LOSSES[:60], layers=(EVIL, "tail"), about=about, changes={(20, Kind.ACTIVATION, EVIL): {"mean": 3.0}},
        ending={"how": "exception", "exception": EVIL}, logged={EVIL: [2.0] * 120},
    )  # fmt: skip
    return compare(a, b)


SAID = ["loss ends higher", "head", "slower", "peak", "accuracy", "new.weight", "argument --lr", "threads", "120 steps that both have"]


def test_the_text_says_the_verdict_first_and_everything_that_differs_below(different):
    text = on_paper(different)
    assert text.startswith("≠ different   B's loss ends higher")
    for words in SAID:
        assert words in text
    titles = ("Runs", "Loss", "Time", "Memory", "Logged", "Layers", "Settings", "Environment")
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_or_ends_in_blanks(different, width):
    for line in on_paper(different, width).splitlines():
        assert len(line) <= width
        assert width < 60 or line == line.rstrip()


def test_a_terminal_of_ordinary_width_shows_columns(different):
    assert any(line.split() == ["steps", "120", "120"] for line in on_paper(different, 80).splitlines())


def test_identical_runs_take_few_words(tmp_path):
    text = on_paper(compare(*(write_pair_run(tmp_path / name, LOSSES) for name in "ab")))
    assert text.startswith("= identical   No measured number differs")
    assert "Settings that differ" not in text
    assert len(text.splitlines()) < 30


def test_a_terminal_without_unicode_is_spoken_to_in_ascii(different):
    class Ascii(io.StringIO):
        encoding = "ascii"

    paper = Ascii()
    Console(file=paper, width=100, highlight=False).print(TerminalComparison(different))
    assert paper.getvalue().startswith("!= different")
    assert not set(paper.getvalue()) & set("≠▁▂▃▄▅▆▇█")


def test_the_page_and_the_markdown_say_what_the_text_says(different):
    for view in (comparison_html(different), comparison_markdown(different)):
        for words in (*SAID, different.headline.replace("'", "&#x27;") if "<html" in view else different.headline):
            assert words in view.replace("\\", "")


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def test_no_name_of_the_users_becomes_a_command_or_a_tag(evil):
    page = Tags(comparison_html(evil))
    assert not {"script", "link", "img", "iframe", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    for view in (on_paper(evil), comparison_html(evil), comparison_markdown(evil)):
        assert "\x1b" not in view
    assert "<script>" not in comparison_markdown(evil)
    assert "[x](" not in comparison_markdown(evil)


def test_both_losses_are_drawn_on_the_same_axes(different):
    page = comparison_html(different)
    assert page.count('<polyline class="curve a"') == page.count('<polyline class="curve b"') == 1
    assert page.count('<polygon class="band') == 2


def test_a_bad_number_is_named_with_its_run():
    drawn = line_chart([ChartLine([0, 1, 2], [1.0, 2.0, 3.0], "a", "A"), ChartLine([0, 1, 2], [1.0, math.nan, 2.0], "b", "B")], name="loss")
    assert "B: NaN from step 1" in drawn
    assert "A: " not in drawn


def test_runs_with_nothing_in_common_are_drawn_too(tmp_path):
    found = compare(write_pair_run(tmp_path / "a", LOSSES), write_pair_run(tmp_path / "b", ()))
    for view in (on_paper(found), comparison_html(found), comparison_markdown(found)):
        assert "Nothing can be compared" in view
