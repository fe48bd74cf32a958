"""GradientFlowAnimator: gradients per layer and step as frames, with exports, an animation and a summary."""

import csv
import io
import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from sonde.errors import SondeError, require_count
from sonde.formatting import counted, listing, number, printable, strict_json
from sonde.render import draw_gradient_flow_animation
from sonde.render.safe_write import replace_file, require_path
from sonde.tools.gradients import gradient_flow_analysis
from sonde.tools.gradients.gradient_flow_analysis import GradientFrame, GradientHealth, GradientSize, LayerGradientInfo
from sonde.tools.hook_that_never_raises import require_module
from sonde.tools.tensors.describe_tensor import fast_statistics

__all__ = ["GradientFlowAnimator", "GradientFlowSummary", "GradientFrame", "GradientHealth", "LayerGradientInfo"]

VANISHING = 1e-7  # mean absolute value: a smaller update does not change float32 weights near 1
EXPLODING = 1e3  # largest absolute value
EXAMPLE = 'For instance record_step(0, {"encoder": encoder.weight.grad}), or record_model(0, model).'
CSV_HEADER = ("step", "layer", "mean_abs_grad", "max_abs_grad", "grad_norm", "is_vanishing", "is_exploding")
SPREADSHEET_FORMULA = ("=", "+", "-", "@", "\t")  # first characters
_log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class GradientFlowSummary:
    """Result of `GradientFlowAnimator.summary_report`. Printed, it is a short text."""

    total_steps: int  # last step + 1; 0 if nothing was recorded
    layers_with_vanishing_grads: tuple[str, ...]
    layers_with_exploding_grads: tuple[str, ...]
    overall_health: GradientHealth
    recommendations: tuple[str, ...]

    def __str__(self) -> str:
        health = self.overall_health.value.replace("_", " ")
        lines = [f"gradient flow: {health if self.total_steps else 'nothing recorded'}, {counted(self.total_steps, 'step')}"]
        for issue, names in (("vanishing", self.layers_with_vanishing_grads), ("exploding", self.layers_with_exploding_grads)):
            if names:
                lines.append(printable(f"{issue}: {listing(names, gradient_flow_analysis.MAX_NAMES)}"))
        return "\n".join([*lines, *(printable(f"- {line}") for line in self.recommendations)])


class GradientFlowAnimator:
    """Records gradient statistics per layer and step as frames. With `max_frames` above 0 the oldest frames are dropped. Only statistics
    are stored, no gradient."""

    def __init__(self, max_frames: int = 0, vanishing_threshold: float = VANISHING, exploding_threshold: float = EXPLODING) -> None:
        self.max_frames = require_count(max_frames, "max_frames", minimum=0)
        self._frames: deque[GradientFrame] = deque(maxlen=self.max_frames or None)
        self.vanishing_threshold = _threshold(vanishing_threshold, "vanishing_threshold", VANISHING)
        self.exploding_threshold = _threshold(exploding_threshold, "exploding_threshold", EXPLODING)
        self._warned: set[str] = set()

    def with_vanishing_threshold(self, threshold: float) -> Self:
        """Sets the threshold for frames recorded from now on: a layer vanishes if its mean absolute gradient is below it."""
        self.vanishing_threshold = _threshold(threshold, "vanishing_threshold", VANISHING)
        return self

    def with_exploding_threshold(self, threshold: float) -> Self:
        """Sets the threshold for frames recorded from now on: a layer explodes if its largest absolute gradient is above it."""
        self.exploding_threshold = _threshold(threshold, "exploding_threshold", EXPLODING)
        return self

    def record_step(self, step: int, gradients: Mapping[str, Any]) -> None:
        """Records one frame from the gradient of each layer: a tensor, array or list of any shape. A layer with None is left out."""
        if not isinstance(gradients, Mapping):
            raise SondeError(f"gradients must be a mapping from layer names to gradients, not a {type(gradients).__name__}.\n{EXAMPLE}")
        sizes = {}
        for name, gradient in gradients.items():
            if not isinstance(name, str):
                raise SondeError(f"A layer name is a string, not {name!r} of type {type(name).__name__}.")
            if gradient is not None:
                sizes[name] = measure_gradient(name, gradient)
        self.record_sizes(step, sizes)

    def record_model(self, step: int, model: nn.Module) -> None:
        """Records one frame from the current `.grad` of each parameter, by parameter name; parameters without one are left out. A gradient
        that cannot be read (on the meta device, for instance) is left out too; a warning names it once."""
        require_module(model, "record_model", "For plain gradients use record_step.")
        sizes = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            found = fast_statistics(parameter.grad)
            if not found.unsupported:
                sizes[name] = GradientSize.from_statistics(found)
            elif name not in self._warned:
                self._warned.add(name)
                _log.warning("the gradient of %s is not recorded: %s", name, found.unsupported)
        self.record_sizes(step, sizes)

    def record_sizes(self, step: int, sizes: Mapping[str, GradientSize]) -> None:
        """Records one frame from gradients that are already measured."""
        if not isinstance(sizes, Mapping) or not all(isinstance(size, GradientSize) for size in sizes.values()):
            raise SondeError(f"sizes must be a mapping from layer names to GradientSize. For plain gradients use record_step.\n{EXAMPLE}")
        thresholds = self.vanishing_threshold, self.exploding_threshold
        self._frames.append(gradient_flow_analysis.build_frame(require_count(step, "step", minimum=0), sizes, *thresholds))

    def replace_last_sizes(self, sizes: Mapping[str, GradientSize]) -> None:
        """Replaces the layers of the last frame, if there is one."""
        if self._frames:
            self.record_sizes(self._frames.pop().step, sizes)

    @property
    def frames(self) -> tuple[GradientFrame, ...]:
        """The stored frames, oldest first."""
        return tuple(self._frames)

    def clear(self) -> None:
        """Drops all frames."""
        self._frames.clear()

    def summary_report(self) -> GradientFlowSummary:
        """Summarizes the stored frames: vanishing and exploding layers, health class and recommendations."""
        frames = self.frames
        layers = [layer for frame in frames for layer in frame.layers]
        vanishing = tuple(sorted({layer.name for layer in layers if layer.is_vanishing}))
        exploding = tuple(sorted({layer.name for layer in layers if layer.is_exploding}))
        health = gradient_flow_analysis.classify_health(frames, exploded=bool(exploding), vanished=bool(vanishing))
        nonfinite = tuple(sorted({layer.name for layer in layers if not math.isfinite(layer.grad_norm)}))
        too_large = tuple(sorted({layer.name for layer in layers if layer.is_exploding and math.isfinite(layer.grad_norm)}))
        clipping = gradient_flow_analysis.clipping_advice(frames)
        advice = gradient_flow_analysis.recommendations(vanishing, too_large, nonfinite, health, clipping)
        if not layers:
            advice = ["No gradient was recorded: call record_step or record_model after backward()."]
        return GradientFlowSummary(frames[-1].step + 1 if frames else 0, vanishing, exploding, health, tuple(advice))

    def to_ascii_animation(self) -> str:
        """The frames as text: one row per layer, one column per frame."""
        return draw_gradient_flow_animation.ascii_animation(self.frames)

    def play(self, fps: float = 10.0) -> None:
        """Plays the frames in the terminal. If standard output is not a terminal, the whole animation is printed once."""
        draw_gradient_flow_animation.play(self.frames, fps)

    def export_json(self, path: str | Path) -> Path:
        """Writes the list of frames as strict JSON; non-finite values are the strings "NaN" and "Infinity". Returns the path."""
        return replace_file(path, strict_json([asdict(frame) for frame in self._frames]) + "\n")

    def export_csv(self, path: str | Path) -> Path:
        """Writes one row per frame and layer, quoted as in RFC 4180. A name that a spreadsheet would take for a formula gets an
        apostrophe before it. Returns the path."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(CSV_HEADER)
        for frame in self._frames:
            for layer in frame.layers:
                numbers = (layer.mean_abs_grad, layer.max_abs_grad, layer.grad_norm)
                flags = int(layer.is_vanishing), int(layer.is_exploding)
                rows.writerow([frame.step, _csv_text(layer.name), *map(_scientific, numbers), *flags])
        return replace_file(path, text.getvalue())

    def export_gif(self, path: str | Path, fps: float = 8.0) -> Path:
        """Writes an animation of the norms per layer and returns the path. Needs Pillow: `pip install "sonde[plot]"`."""
        if Path(require_path(path)).suffix.lower() != ".gif":
            raise SondeError(f"{path} is no GIF: the name must end in .gif. export_html(path) writes a page with a slider.")
        return replace_file(path, draw_gradient_flow_animation.animation_gif(self.frames, fps))

    def export_html(self, path: str | Path) -> Path:
        """Writes one self-contained HTML page with a slider over the steps. Returns the path."""
        return replace_file(path, draw_gradient_flow_animation.animation_html(self.frames))


def measure_gradient(name: str, gradient: Any) -> GradientSize:
    """Measures a tensor, array or list; `name` is the layer in the error message."""
    try:
        found = fast_statistics(gradient)
    except SondeError as error:
        raise SondeError(f"The gradient of {name!r} cannot be recorded. {error}") from None
    if found.unsupported:
        raise SondeError(f"The gradient of {name!r} cannot be recorded: {found.unsupported}. Leave it out, or pass None.")
    return GradientSize.from_statistics(found)


def _threshold(value: Any, what: str, example: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise SondeError(f"{what} must be a number, 0 or more, not {value!r}. For instance {what}={example:g}.")
    return float(value)


def _csv_text(text: str) -> str:
    text = text.replace("\r", "\\r")  # Python before 3.13 does not quote a carriage return
    return f"'{text}" if text.startswith(SPREADSHEET_FORMULA) else text


def _scientific(value: float) -> str:
    return f"{value:.8e}" if math.isfinite(value) else number(value)
