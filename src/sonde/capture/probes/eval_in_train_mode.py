"""Train or eval, without gradients: which pauses of the training run a model that is in training mode, and on what.

A pause is what is evaluated between two updates. What happens in it is told when the next one begins, or at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sonde.capture.call_site import describe_line, user_frame
from sonde.capture.probes.base import Probe, Tools
from sonde.capture.watched_model import Watched, depends_on_mode
from sonde.statistics.deferred_reads import on_device
from sonde.statistics.fingerprint import content_hash
from sonde.statistics.tensor_utils import find_tensors

ALL_OF_THE_FIRST = 16  # pauses of a model that are looked into; then the 32nd, the 64th …: every step may have one (a GAN, a rollout)
INPUTS_COMPARED = 4  # forwards of a pause: one input again and again is a sample of a random network, several are a dataset


@dataclass(slots=True)
class _Pause:
    step: int
    num: int  # of those of this model in training mode, from 1 on
    num_forwards: int = 0
    inputs: list[float] = field(default_factory=list)
    num_dropout: int = 0
    num_batch_norm: int = 0
    cumulative: bool = False  # batch norm that averages over all batches: its statistics are being computed anew
    line: str = ""  # of the user's code, which ran it first
    text: str = ""

    @property
    def is_looked_into(self) -> bool:
        return self.num <= ALL_OF_THE_FIRST or self.num & (self.num - 1) == 0


class Validation(Probe):
    name = "validation"

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._trained: set[Watched] = set()  # models that ran with gradients: a teacher that never does is no concern
        self._pauses: dict[Watched, _Pause] = {}

    def entered(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._trained.add(watched)

    def evaluated(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any, step: int) -> None:
        if watched not in self._trained:
            return
        pause = self._pauses.get(watched)
        if pause is None or pause.step != step:
            self._tell(watched, step)
            pause = self._pauses[watched] = _Pause(step, pause.num + 1 if pause is not None else 1)
            if pause.is_looked_into:
                _look_at_modules(pause, module)
                frame = user_frame()
                pause.line, pause.text = describe_line(frame) if frame is not None else ("", "")
        pause.num_forwards += 1
        if pause.num_forwards <= INPUTS_COMPARED and pause.is_looked_into:
            pause.inputs.append(_content(args, kwargs))

    def rest(self) -> None:
        for watched, pause in self._pauses.items():
            self._tell(watched, pause.step)
            pause.step = -1  # told: what comes after is another one

    def _tell(self, watched: Watched, step: int) -> None:
        pause = self._pauses.get(watched)
        if pause is not None and pause.step >= 0 and pause.is_looked_into:
            self._journal.event(
                "evaluated_in_training", step, model=watched.name, at=pause.step, num_pauses=pause.num, num_forwards=pause.num_forwards,
                num_inputs=len(set(pause.inputs)), input=pause.inputs[0], num_dropout=pause.num_dropout,
                num_batch_norm=pause.num_batch_norm, cumulative=pause.cumulative, num_models=len(self._trained), line=pause.line,
                text=pause.text,
            )  # fmt: skip


def _look_at_modules(pause: _Pause, module: nn.Module) -> None:
    for part in module.modules():
        if part.training and depends_on_mode(part):
            if isinstance(part, nn.modules.batchnorm._NormBase):
                pause.num_batch_norm += 1
                pause.cumulative = pause.cumulative or part.momentum is None
            else:
                pause.num_dropout += 1


def _content(args: Any, kwargs: Any) -> float:
    """Tells inputs apart; on a device, where one would have to wait, by their place."""
    tensors: list[Tensor] = [tensor for _, tensor in find_tensors((args, kwargs))]
    if not tensors:
        return 0.0
    known = None if on_device(tensors[0]) else content_hash(tensors[0])
    return float(known if known is not None else id(tensors[0]))
