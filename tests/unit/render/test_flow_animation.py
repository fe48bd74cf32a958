"""Gradient flow drawn: in characters, in a terminal, as a GIF, as a page. No torch: frames are plain values."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest

from sonde.errors import SondeError
from sonde.render.draw_gradient_flow_animation import (
    animation_gif,
    animation_html,
    ascii_animation,
    by_depth,
    norm_axis,
    terminal_frame,
    thin_frames,
)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"


@dataclass
class Layer:
    name: str
    grad_norm: float
    flow_intensity: float = 0.0
    is_vanishing: bool = False
    is_exploding: bool = False

    @property
    def mean_abs_grad(self) -> float:
        return self.grad_norm

    @property
    def max_abs_grad(self) -> float:
        return self.grad_norm


@dataclass
class Frame:
    step: int
    layers: list[Layer]


def row(*intensities: float) -> list[Frame]:
    return [Frame(step, [Layer("a", 1.0, intensity)]) for step, intensity in enumerate(intensities)]


# ---- characters


def test_the_animation_of_nothing_says_so():
    assert ascii_animation([]) == "(no gradient frames recorded)"


def test_the_animation_has_a_header_with_digits_a_rule_and_one_right_aligned_row_per_layer():
    frames = [
        Frame(0, [Layer("encoder", 1.0, 1.0), Layer("head", 1.0, 0.5)]),
        Frame(1, [Layer("encoder", 1.0, 0.25)]),
        Frame(2, [Layer("head", 1.0, 1.0)]),
    ]
    assert ascii_animation(frames).split("\n") == [
        "        │ 012",
        "────────┼────",
        "encoder │ █░ ",
        "   head │ ▒ █",
    ]


def test_the_digit_of_a_column_is_its_index_modulo_ten():
    header = ascii_animation(row(*[0.0] * 23)).split("\n")[0]
    assert header.endswith("│ 01234567890123456789012")


@pytest.mark.parametrize(
    ("intensity", "shade"),
    [(0.0, " "), (0.124, " "), (0.125, "░"), (0.374, "░"), (0.376, "▒"), (0.6, "▒"), (0.63, "▓"), (0.874, "▓"), (0.876, "█"), (1.0, "█")],
)
def test_an_intensity_is_rounded_to_the_nearest_of_five_shades(intensity, shade):
    assert ascii_animation(row(intensity)).split("\n")[2] == f"a │ {shade}"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_has_a_mark_of_its_own(bad):
    assert ascii_animation([Frame(0, [Layer("a", bad, 1.0), Layer("b", 1.0, 1.0)])]).split("\n")[2:] == ["a │ ✗", "b │ █"]


def test_a_name_cannot_command_the_terminal_and_wide_letters_keep_the_columns():
    rows = ascii_animation([Frame(0, [Layer("\x1b[2J", 1.0, 1.0), Layer("層", 1.0, 1.0), Layer("plain", 1.0, 1.0)])]).split("\n")
    assert "\x1b" not in "".join(rows)
    assert rows[2] == "\\x1b[2J │ █"
    assert rows[4] == "     層 │ █"


def test_layers_are_ordered_by_their_numbers_where_depth_is_drawn():
    assert by_depth(["layers.10.w", "layers.2.w", "head", "layers.2.b"]) == ["head", "layers.2.b", "layers.2.w", "layers.10.w"]


def test_thinning_keeps_the_worst_frame_of_each_group():
    frames = [Frame(step, [Layer("a", math.nan if step == 57 else 1.0)]) for step in range(100)]
    shown = thin_frames(frames, 10)
    assert len(shown) == 10
    assert 57 in [frame.step for frame in shown]


# ---- the terminal


def many(num: int) -> Frame:
    return Frame(3, [Layer(f"layer.{i}", math.nan if i == num - 1 else 10.0**-i, 0.5) for i in range(num)])


def test_a_frame_fits_the_terminal_and_shows_the_worst_layers_where_not_all_fit():
    frame = many(50)
    lines = terminal_frame(frame, [layer.name for layer in frame.layers], norm_axis([frame]), 60, 12)
    text = "\n".join(line.plain for line in lines)
    assert len(lines) <= 12
    assert max(line.cell_len for line in lines) <= 60
    assert "layer.49" in text
    assert "NaN" in text
    assert "more layers" in text


def test_a_frame_in_the_terminal_has_a_title_a_heading_and_no_bar_for_nan():
    frame = Frame(3, [Layer("encoder", 2.0), Layer("head", math.nan)])
    lines = [line.plain for line in terminal_frame(frame, ["encoder", "head"], norm_axis([frame]), 60, 12)]
    assert lines[0] == "Gradient flow, step 3"
    assert lines[1] == "  layer gradient norm (linear scale)"
    assert lines[2].startswith("encoder ████")
    assert lines[3] == "   head ✗ NaN"


PLAY = """
from sonde.render.draw_gradient_flow_animation import play
from types import SimpleNamespace as N
def layer(name, norm):
    return N(name=name, grad_norm=norm, mean_abs_grad=norm, max_abs_grad=norm, is_vanishing=False, is_exploding=False, flow_intensity=1.0)
play([N(step=s, layers=[layer("enc", 1.0 + s), layer("\\x1b[2Jhead", float("nan"))]) for s in range(3)], fps=1000)
"""


def test_playing_into_a_pipe_prints_the_animation_once_without_escape_sequences():
    done = subprocess.run([sys.executable, "-c", PLAY], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONUTF8": "1"})
    assert done.stdout.count("enc │ ███") == 1
    assert done.stdout.startswith("Gradient flow: norm of each layer")
    assert "head │ ✗✗✗" in done.stdout
    assert "\x1b" not in done.stdout
    assert not done.stderr


def test_playing_in_a_terminal_shows_every_frame_and_gives_the_cursor_back():
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONUTF8": "1", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen([sys.executable, "-c", PLAY], stdout=child, stderr=child, stdin=child, env=environment)
    os.close(child)
    output = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # Linux says so when the other side has closed
            break
        if not piece:
            break
        output += piece
    os.close(parent)
    assert process.wait() == 0, output
    text = output.decode()
    assert all(f"step {step}" in text for step in range(3))
    assert "NaN" in text
    assert "\x1b[2Jhead" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


# ---- GIF


def test_the_gif_has_one_picture_per_frame_and_repeats():
    image_module = pytest.importorskip("PIL.Image")
    frames = [Frame(step, [Layer("a", 1.0 + step), Layer("b", 10.0**-step)]) for step in range(7)]
    with image_module.open(io.BytesIO(animation_gif(frames, fps=5))) as image:
        assert image.format == "GIF"
        assert image.n_frames == 7
        assert image.info["duration"] == 200
        assert image.info["loop"] == 0


def test_a_bad_number_is_red_in_the_gif_and_500_layers_fit():
    image_module = pytest.importorskip("PIL.Image")
    frames = [Frame(0, [Layer(f"{HOSTILE} 層 {i}", math.inf if i == 250 else 1.0 + i) for i in range(500)])]
    with image_module.open(io.BytesIO(animation_gif(frames, fps=5))) as image:
        assert image.height < 1200
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert any(red > 180 and green < 40 and blue < 60 for red, green, blue in colours)


def test_the_gif_of_nothing_is_refused_with_what_to_call():
    with pytest.raises(SondeError, match="record_step"):
        animation_gif([], fps=5)


# ---- the page


class Parts(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[int, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(("", {}))  # what follows is not inside of it

    def handle_data(self, data: str) -> None:
        self.content[len(self.tags) - 1] = self.content.get(len(self.tags) - 1, "") + data

    def texts(self, tag: str) -> list[str]:
        return [self.content.get(i, "") for i, (name, _) in enumerate(self.tags) if name == tag]


def sample_page() -> str:
    layers = [Layer(HOSTILE, math.nan, 1.0, is_exploding=True), Layer("zero", 0.0, is_vanishing=True), Layer("fine", 2.0, 1.0)]
    return animation_html([Frame(4, layers), Frame(9, layers[1:])])


def test_the_page_loads_nothing_and_allows_its_one_script_alone():
    text = sample_page()
    parts = Parts(text)
    assert not [attrs for _, attrs in parts.tags if attrs.get("src") or attrs.get("href")]
    assert not re.search(r"https?://|url\(|@import", text)
    data, script = parts.texts("script")
    policy = next(attrs["content"] for tag, attrs in parts.tags if tag == "meta" and attrs.get("http-equiv"))
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1]
    json.loads(data)


def test_a_hostile_name_stays_a_name():
    parts = Parts(sample_page())
    assert len([tag for tag, _ in parts.tags if tag == "script"]) == 2
    assert not [tag for tag, _ in parts.tags if tag == "img"]
    data = json.loads(parts.texts("script")[0])
    assert any(name.startswith("</script><script>alert(1)") for name in data["layers"])


def test_the_page_has_a_scrubber_over_all_frames_and_strict_numbers():
    parts = Parts(sample_page())
    scrubber = next(attrs for tag, attrs in parts.tags if tag == "input")
    assert (scrubber["type"], scrubber["min"], scrubber["max"]) == ("range", "0", "1")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    data = json.loads(parts.texts("script")[0], parse_constant=refuse)
    assert [frame["step"] for frame in data["frames"]] == [4, 9]
    cells = dict(zip(data["layers"], data["frames"][0]["cells"]))
    hostile = next(cell for name, cell in cells.items() if "alert" in name)
    assert hostile[:3] == [1.0, 3, "NaN"]
    assert cells["zero"][:3] == [0.0, 1, "0"]
    assert None in data["frames"][1]["cells"]


def test_the_page_of_nothing_says_so_and_runs_nothing():
    text = animation_html([])
    assert "no gradient frames recorded" in text
    assert "<script" not in text
