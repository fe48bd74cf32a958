"""Gradients layer by layer and step by step, as frames: to export, to draw, to play, to judge."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from sonde.errors import SondeError
from sonde.report import strict
from sonde.rules.words import number
from sonde.tools.gradient_flow_frames import GradientFrame, LayerGradient, Size, frame_of
from sonde.tools.gradient_health import GradientHealth, clipping_advice, health_of, issue_share, recommendations
from sonde.tools.tensor_statistics import quick
from sonde.views import flow_animation, flow_gif, flow_page
from sonde.views.file import write_new
from sonde.views.plots.plot import make_folder

__all__ = ["FlowSummary", "GradientFlowAnimator", "GradientFrame", "GradientHealth", "LayerGradient"]

VANISHING = 1e-7  # mean absolute value: float32 weights near 1 do not feel less than this
EXPLODING = 1e3  # largest absolute value
CSV_HEADER = ("step", "layer", "mean_abs_grad", "max_abs_grad", "grad_norm", "is_vanishing", "is_exploding")
_log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class FlowSummary:
    total_steps: int  # last step + 1; 0 where nothing was recorded
    layers_with_vanishing_grads: tuple[str, ...]
    layers_with_exploding_grads: tuple[str, ...]
    overall_health: GradientHealth
    recommendations: tuple[str, ...]


class GradientFlowAnimator:
    """Records per-layer gradient statistics step by step and turns them into frames.

    `max_frames` 0 keeps every frame; otherwise the oldest is dropped first. Only numbers are kept, never a gradient.
    """

    def __init__(self, max_frames: int = 0, vanishing_threshold: float = VANISHING, exploding_threshold: float = EXPLODING) -> None:
        self.max_frames = _whole(max_frames, "max_frames", "0 keeps every frame")
        self._frames: deque[GradientFrame] = deque(maxlen=self.max_frames or None)
        self.vanishing_threshold = _threshold(vanishing_threshold, "vanishing_threshold")
        self.exploding_threshold = _threshold(exploding_threshold, "exploding_threshold")
        self._warned: set[str] = set()

    def with_vanishing_threshold(self, threshold: float) -> Self:
        """Frames recorded from now on call a layer vanishing where its mean absolute gradient is below this."""
        self.vanishing_threshold = _threshold(threshold, "vanishing_threshold")
        return self

    def with_exploding_threshold(self, threshold: float) -> Self:
        """Frames recorded from now on call a layer exploding where its largest absolute gradient is above this."""
        self.exploding_threshold = _threshold(threshold, "exploding_threshold")
        return self

    # -- recording ---------------------------------------------------------------------------------

    def record_step(self, step: int, gradients: Mapping[str, Any]) -> None:
        """One frame: each layer's gradient as a tensor, array or list of any shape. A layer given as None is missing in this frame."""
        if not isinstance(gradients, Mapping):
            raise SondeError(
                f"gradients must map layer names to gradients, not be a {type(gradients).__name__}.\n"
                'For instance record_step(0, {"encoder": encoder.weight.grad}), or record_model(0, model).'
            )
        sizes = {}
        for name, gradient in gradients.items():
            if not isinstance(name, str):
                raise SondeError(f"A layer is named by a text, not by {name!r} of type {type(name).__name__}.")
            if gradient is not None:
                sizes[name] = size_of(name, gradient)
        self.record_sizes(step, sizes)

    def record_model(self, step: int, model: nn.Module) -> None:
        """One frame from the gradients that a model's parameters hold now, by parameter name; those without a gradient are missing.

        A gradient that cannot be read (on the meta device, say) is missing, too, and named once in a warning.
        """
        if not isinstance(model, nn.Module):
            raise SondeError(f"record_model takes a torch.nn.Module, not a {type(model).__name__}. For plain gradients use record_step.")
        sizes = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            found = quick(parameter.grad)
            if not found.unsupported:
                sizes[name] = Size.of(found)
            elif name not in self._warned:
                self._warned.add(name)
                _log.warning("the gradient of %s is not recorded: %s", name, found.unsupported)
        self.record_sizes(step, sizes)

    def record_sizes(self, step: int, sizes: Mapping[str, Size]) -> None:
        """One frame from gradients that were measured already."""
        self._frames.append(
            frame_of(
                _whole(step, "step", "steps count up from 0"),
                sizes,
                vanishing_threshold=self.vanishing_threshold,
                exploding_threshold=self.exploding_threshold,
            )
        )

    @property
    def frames(self) -> tuple[GradientFrame, ...]:
        return tuple(self._frames)

    # -- judging -----------------------------------------------------------------------------------

    def summary_report(self) -> FlowSummary:
        """What the kept frames say: which layers vanish or explode, how healthy that is, and what to do."""
        frames = self.frames
        layers = [layer for frame in frames for layer in frame.layers]
        vanishing = tuple(sorted({layer.name for layer in layers if layer.is_vanishing}))
        exploding = tuple(sorted({layer.name for layer in layers if layer.is_exploding}))
        health = health_of(exploded=bool(exploding), vanished=bool(vanishing), issue_share=issue_share(frames))
        advice = recommendations(vanishing, exploding, health, clipping_advice(frames))
        if not layers:
            advice = ("No gradient was recorded, so nothing could be judged: call record_step or record_model after backward().",)
        return FlowSummary(frames[-1].step + 1 if frames else 0, vanishing, exploding, health, advice)

    # -- out ---------------------------------------------------------------------------------------

    def to_ascii_animation(self) -> str:
        """One row per layer, one column per frame."""
        return flow_animation.ascii_animation(self.frames)

    def play(self, fps: float = 10.0) -> None:
        """Play the frames in the terminal. Where the output is no terminal, the whole animation is printed once."""
        flow_animation.play(self.frames, fps)

    def export_json(self, path: str | Path) -> Path:
        """Strict JSON: thresholds and frames; what is not finite is the string "NaN" or "Infinity"."""
        document = {
            "vanishing_threshold": self.vanishing_threshold,
            "exploding_threshold": self.exploding_threshold,
            "max_frames": self.max_frames,
            "frames": [asdict(frame) for frame in self._frames],
        }
        return _written(path, json.dumps(strict(document), indent=1, allow_nan=False) + "\n")

    def export_csv(self, path: str | Path) -> Path:
        """One row per frame and layer, in RFC 4180's quoting."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(CSV_HEADER)
        for frame in self._frames:
            for layer in frame.layers:
                numbers = (layer.mean_abs_grad, layer.max_abs_grad, layer.grad_norm)
                rows.writerow([frame.step, layer.name, *map(_scientific, numbers), int(layer.is_vanishing), int(layer.is_exploding)])
        return _written(path, text.getvalue())

    def export_gif(self, path: str | Path, fps: float = 8.0) -> Path:
        """An animation of the norms, layer by layer. Needs Pillow, which comes with `pip install "sonde[plot]"`."""
        return _written(path, flow_gif.gif(self.frames, fps))

    def export_html(self, path: str | Path) -> Path:
        """One self-contained page with a scrubber; nothing is loaded from anywhere."""
        return _written(path, flow_page.page(self.frames))


def size_of(name: str, gradient: Any) -> Size:
    try:
        found = quick(gradient)
    except SondeError as error:
        raise SondeError(f"The gradient of {name!r} cannot be recorded. {error}") from None
    if found.unsupported:
        raise SondeError(f"The gradient of {name!r} cannot be recorded: {found.unsupported}. Leave it out, or give None.")
    return Size.of(found)


def _whole(given: Any, what: str, hint: str) -> int:
    try:
        whole = operator.index(given)
    except TypeError:
        whole = -1
    if whole < 0 or isinstance(given, bool):
        raise SondeError(f"{what} must be a whole number, 0 or more, not {given!r}: {hint}.")
    return whole


def _threshold(given: Any, what: str) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 0:
        raise SondeError(f"{what} must be a number, 0 or more, not {given!r}. For instance {what}=1e-7.")
    return float(given)


def _scientific(value: float) -> str:
    return f"{value:.8e}" if math.isfinite(value) else number(value)


def _written(path: str | Path, content: str | bytes) -> Path:
    target = Path(path)
    make_folder(target.parent)
    write_new(target, content, replace=True)
    return target
