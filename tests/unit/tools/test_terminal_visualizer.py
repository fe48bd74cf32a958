"""TerminalVisualizer: plots of tensors as text, in the characters that standard output can encode."""

import io
import sys

import pytest

torch = pytest.importorskip("torch")

from sonde import SondeError, TerminalVisualizer  # noqa: E402

pytestmark = pytest.mark.torch


class Terminal(io.TextIOWrapper):
    """Standard output with a chosen encoding, as a terminal or not."""

    def __init__(self, encoding, tty=False):
        super().__init__(io.BytesIO(), encoding=encoding)
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.fixture
def on(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def replace(encoding, tty=False):
        monkeypatch.setattr(sys, "stdout", Terminal(encoding, tty))

    return replace


def test_the_snippet_of_the_documentation_draws_tensors_with_gradients():
    visualizer = TerminalVisualizer(width=80, height=24)
    weights = torch.randn(1000, requires_grad=True)
    losses = [torch.tensor(1.0 / (step + 1), requires_grad=True) for step in range(50)]
    assert "1,000 values" in visualizer.ascii_histogram(weights, 10)
    assert visualizer.ascii_line_plot(torch.arange(50), losses, "loss").startswith("loss\n")
    assert weights.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_every_kind_of_tensor_is_drawn(dtype):
    assert "6 values" in TerminalVisualizer().ascii_histogram(torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype), 4)


def test_a_tensor_without_values_raises_a_clear_error():
    with pytest.raises(SondeError, match="meta tensor"):
        TerminalVisualizer().ascii_histogram(torch.empty(3, device="meta"))


def test_a_terminal_without_braille_gets_ascii(on):
    drawings = TerminalVisualizer(60, 12)
    on("ascii")
    assert drawings.ascii_line_plot(range(9), range(9), "up").isascii()
    assert drawings.ascii_histogram([1.0, float("nan")]).isascii()
    assert drawings.heatmap([[1.0, 2.0]], ["编"]).isascii()
    on("utf-8")
    assert "⠁" < max(drawings.ascii_line_plot(range(9), range(9), "up")) <= "⣿"


def test_a_latin_terminal_gets_ascii(on):
    on("latin-1")
    TerminalVisualizer().ascii_line_plot(range(9), range(9), "up").encode("latin-1")


def test_colors_are_used_only_in_terminals_that_support_them(on, monkeypatch):
    bad = [1.0, float("nan")]
    on("utf-8", tty=True)
    assert "\x1b[31m" in TerminalVisualizer().ascii_histogram(bad)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in TerminalVisualizer().ascii_histogram(bad)
    assert "\x1b[31m" in TerminalVisualizer(colour=True).ascii_histogram(bad)
    monkeypatch.delenv("NO_COLOR")
    on("utf-8", tty=False)
    assert "\x1b" not in TerminalVisualizer().ascii_histogram(bad)
    on("utf-8", tty=True)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in TerminalVisualizer().ascii_histogram(bad)


def test_the_layers_of_a_model_are_drawn_as_a_table():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    rows = {name: {"mean": p.mean().item(), "std": p.std().item()} for name, p in model.named_parameters()}
    lines = TerminalVisualizer(60).layer_table(rows).split("\n")
    assert [line.split()[0] for line in lines[2:]] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("size", [{"width": 3}, {"width": -80}, {"height": 0}, {"width": 80.5}, {"height": True}])
def test_a_size_that_is_too_small_is_refused(size):
    with pytest.raises(SondeError, match=next(iter(size))):
        TerminalVisualizer(**size)
