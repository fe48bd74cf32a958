"""A profile in a terminal and as a page of flames: the same numbers, folded to what matters, and not fooled by a name."""

import io
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from rich.console import Console

from sample_profiles import sample_profile, spread
from sonde.formatting import milliseconds, si_number, whole_percent
from sonde.profiler import ProfileReport, TimeSpread
from sonde.render.html.profile_html import flame_boxes, profile_html
from sonde.render.profile_tree import forest, merged
from sonde.render.terminal.print_to_terminal import Terminal
from sonde.render.terminal.profile_terminal import MAX_ROWS, TerminalProfile, comparison_text, profile_text

EVIL = """<script>alert(1)</script>"'\x1b[31m\u202e"""
CHROMIUM = shutil.which("chromium")


def tree(text: str) -> list[str]:
    """The rows of the layers, without their head."""
    rows = text.split("\n")
    start = next(number for number, row in enumerate(rows) if row.startswith("layer "))
    end = rows.index("", start)
    return rows[start + 1 : end]


def row(text: str, name: str) -> str:
    return next(row for row in tree(text) if f"{name} " in row)


# ---- the tree


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal(width):
    report = sample_profile(12, slow=3.0, slow_block=7)
    for text in (profile_text(report, width=width), comparison_text(report.compare(sample_profile(12)), width=width)):
        assert max(map(len, text.split("\n"))) <= width


def test_a_row_says_forward_backward_self_and_share():
    text = profile_text(sample_profile(1), width=80)
    assert re.search(r"attention MultiheadAt\S* +1\.00 +2\.00 +3\.00 +\d+ %", row(text, "attention"))


@pytest.mark.parametrize(("width", "columns"), [(80, 0), (90, 1), (120, 3), (200, 5)])
def test_the_memory_of_layers_is_shown_at_every_width_and_more_columns_where_there_is_room(width, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    report = sample_profile(2)
    text = str(report)  # as print() shows it
    head = next(line for line in text.split("\n") if line.startswith("layer ")).split()
    assert "memory" in head
    assert " 2 kB" in row(text, "attention")
    assert sum(name in head for name in ("of", "±", "FLOP", "calls", "source")) >= columns
    assert profile_text(report, width=width) == text
    assert max(map(len, text.split("\n"))) <= width


def test_equal_blocks_are_one_row_with_their_sum():
    rows = tree(profile_text(sample_profile(6), width=80))
    (stack,) = [row for row in rows if "Block" in row]
    assert "layers.0–5" in stack
    assert "×6" in stack
    assert f" {6 * (1.82 + 0.1):.1f} " in stack


def test_a_block_that_is_slower_than_its_like_keeps_a_row_of_its_own():
    rows = tree(profile_text(sample_profile(8, slow=3.0, slow_block=5), width=100))
    blocks = [row for row in rows if "Block" in row]
    assert ["layers.0 … 7" in blocks[0], "layers.5" in blocks[1]] == [True, True]
    assert "×7" in blocks[0]


def test_joining_and_folding_loses_no_time():
    report = sample_profile(50, slow=2.0, slow_block=3)
    whole = report.step.median_ms
    nodes = merged(forest(report.layers), whole)
    left = [*nodes]
    own = 0.0
    while left:
        node = left.pop()
        own += node.self_ms
        left += node.children
    assert own == pytest.approx(sum(layer.self_ms for layer in report.layers))


def test_a_thousand_layers_that_are_not_alike_fit_on_a_screen():
    report = sample_profile(250)
    layers = tuple(
        replace(layer, path=re.sub(r"layers\.(\d+)", lambda match: f"part{match[1]}", layer.path)) for layer in report.layers
    )
    assert len(layers) > 1000
    rows = tree(profile_text(replace(report, layers=layers), width=80))
    assert len(rows) <= MAX_ROWS
    assert re.search(r"\d+ more", rows[-1])


def test_what_was_not_measured_is_a_dash_and_not_a_zero():
    report = sample_profile(1)
    forward_only = {"backward": TimeSpread(), "backward_self": TimeSpread(), "flops_forward": 0, "flops_self": 0}
    text = profile_text(replace(report, layers=tuple(replace(layer, **forward_only) for layer in report.layers)), width=100)
    assert "backward" not in text[text.index("layer ") : text.index("section")].split("\n")[0]
    assert milliseconds(math.nan) == "–"


def test_a_profile_with_nothing_in_it_is_still_drawn():
    assert profile_text(ProfileReport(), width=80).startswith("profile")
    assert "<h1>Profile</h1>" in profile_html(ProfileReport())


def test_a_step_that_is_not_a_number_is_drawn():
    report = replace(sample_profile(2), step=TimeSpread(math.nan, math.nan, math.nan, 3), phases={"forward": spread(math.inf)})
    assert "Infinity" in profile_text(report, width=80)
    profile_html(report)


def test_where_only_ascii_can_be_printed_only_ascii_is():
    paper = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    console = Console(file=paper, width=100, highlight=False, markup=False)
    console.print(TerminalProfile(sample_profile(6)))
    paper.seek(0)
    rows = tree(paper.read())
    assert any("|- " in row or "`- " in row for row in rows)
    assert any("x6" in row and "#" in row for row in rows)


def test_no_color_is_obeyed(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    paper = io.StringIO()
    Console(file=paper, force_terminal=True, width=80).print(TerminalProfile(sample_profile(2)))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", paper.getvalue())


def test_a_name_cannot_command_the_terminal():
    report = sample_profile(1)
    evil = tuple(replace(layer, kind=EVIL, path=f"{layer.path}{EVIL}" if layer.path else "") for layer in report.layers)
    text = profile_text(replace(report, layers=evil, title=EVIL, notes=(EVIL,)), width=100)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_sections_stand_under_the_section_around_them():
    text = profile_text(sample_profile(1), width=80)
    assert re.search(r"^tokenise +10 +12\.0 +100 % +1\.20 .*\n  pad +10 +4\.00 +33 % +0\.40 .*$", text, re.MULTILINE)


def test_what_is_in_no_layer_is_named_and_the_sum_is_said():
    report = sample_profile(4)
    text = " ".join(profile_text(report, width=80).split())
    assert "in no layer optimizer 1.50 ms; data 0.50 ms. Layers and these add up to 100 % of the step" in text
    disturbed = replace(report, step=spread(4 * report.step.median_ms))  # shares are of the sum then: it is not said to be the step
    assert "Layers and these add up to 25 % of the step" in " ".join(profile_text(disturbed, width=80).split())


# ---- two profiles


def test_a_comparison_begins_with_its_sentence_and_names_the_slower_layer():
    text = comparison_text(sample_profile(4, slow=2.0, slow_block=2).compare(sample_profile(4)), width=80)
    assert text.startswith("compared    layers.2 2.0x slower")
    assert re.search(r"^layers\.2\.attention +3\.00 +6\.00 +2\.00x  slower$", text, re.MULTILINE)


def test_of_a_hundred_blocks_the_changed_one_has_rows_of_its_own_and_the_others_share_theirs():
    text = comparison_text(sample_profile(100, slow=9.0, slow_block=42).compare(sample_profile(100)), width=80)
    assert "layers.42.attention" in text
    assert re.search(r"^layers\.\*\.attention ×99 +297 +297 +1\.00x  unchanged$", text, re.MULTILINE)


# ---- the page


def data_of(page: str) -> dict:
    return json.loads(page.partition('id="profile">')[2].partition("</script>")[0])


def test_boxes_lie_inside_the_box_above_them():
    boxes = flame_boxes(sample_profile(6, slow=2.0, slow_block=1))
    assert len(boxes) == len(sample_profile(6).layers)
    for box in boxes:
        if box["above"] >= 0:
            above = boxes[box["above"]]
            assert box["depth"] == above["depth"] + 1
            for left in (0, 2):
                assert box["at"][left] >= above["at"][left] - 1e-5
                assert sum(box["at"][left : left + 2]) <= sum(above["at"][left : left + 2]) + 1e-5


def test_widths_are_shares_of_the_time():
    report = sample_profile(2)
    box = next(box for box in flame_boxes(report) if box["path"] == "layers.1.up")
    assert box["at"][1] == pytest.approx(0.8 / report.layers[0].forward.median_ms, abs=1e-5)
    assert box["at"][3] == pytest.approx(1.6 / report.layers[0].backward.median_ms, abs=1e-5)


def test_parts_that_are_longer_than_the_whole_are_drawn_in_proportion():
    report = sample_profile(2)
    short = tuple(replace(layer, forward=spread(0.01)) if layer.kind == "Block" else layer for layer in report.layers)
    boxes = flame_boxes(replace(report, layers=short))
    assert all(sum(box["at"][:2]) <= 1 + 1e-5 for box in boxes)


def test_the_page_loads_nothing_and_runs_its_own_script_alone():
    page = profile_html(sample_profile(2), sample_profile(2, slow=2.0).compare(sample_profile(2)))
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    assert len(re.findall("<script", page)) == 2
    assert "script-src 'sha256-" in page


def test_names_are_text_on_the_page_and_in_its_data():
    report = sample_profile(1)
    evil = tuple(replace(layer, kind=EVIL, path=f"{layer.path}{EVIL}" if layer.path else "") for layer in report.layers)
    page = profile_html(replace(report, layers=evil, title=EVIL, phases={EVIL: spread(1.0)}, notes=(EVIL,), batch=EVIL))
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert data_of(page)["boxes"][1]["kind"] == "<script>alert(1)</script>\"'\\x1b[31m\\u202e"


@pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="chromium is not installed")
def test_a_browser_draws_a_thousand_layers_in_both_flames(tmp_path):
    assert CHROMIUM is not None, "CI has a browser: .ci/run installs it"
    report = sample_profile(250)
    page = tmp_path / "profile.html"
    page.write_text(profile_html(report), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--window-size=1300,900"]
    command += ["--dump-dom", page.as_uri()]
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    boxes = re.findall(r'<div class="box [^>]*>', done.stdout)
    assert len(boxes) == 2 * len(report.layers), done.stderr
    shown = [box for box in boxes if "hidden" not in box]
    assert len(shown) > len(report.layers)  # each is a pixel wide or more
    assert all("width:" in box for box in shown)


# ---- how quantities are written


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.0, "0"), (0.0004, "<0.001"), (0.0234, "0.023"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")],
)
def test_times_have_three_digits(ms, text):
    assert milliseconds(ms) == text


def test_large_numbers_get_a_letter():
    assert [si_number(value, "B") for value in (0, 999, 1000, 1_234_567, 5e9, math.nan)] == ["0 B", "999 B", "1 kB", "1.23 MB", "5 GB", "–"]


def test_a_small_share_is_not_nothing():
    assert [whole_percent(share) for share in (0.0, 0.001, 0.34, math.nan)] == ["0 %", "<1 %", "34 %", "–"]


@pytest.mark.parametrize(("widest", "width"), [(100, 100), (10_000, 160)])
def test_a_profile_may_be_wider_than_other_output_of_commands(widest, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    paper = io.StringIO()
    terminal = Terminal(paper, widest=widest)
    assert terminal.width == width
    terminal.print(TerminalProfile(replace(sample_profile(4), notes=("word " * 60,))))
    lines = re.sub(r"\x1b\[[\d;]*m", "", paper.getvalue()).split("\n")
    assert ("source" in next(line for line in lines if "forward backward" in line)) == (width == 160)
    assert max(len(line) for line in lines if "word" in line) <= 100  # text is no wider: long lines are hard to follow
