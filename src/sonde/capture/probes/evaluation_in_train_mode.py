"""Evaluation in training mode: pauses of the training in which a model runs without gradients while it is in train mode.

A pause is what is evaluated between two updates. It is recorded when the next one begins, or at the end.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.user_source_line import describe_line, user_frame
from sonde.capture.watched_model import WatchedModel, depends_on_mode
from sonde.events import EvaluatedInTrainMode
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.content_hash import content_hash
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import BATCH_NORM

NUM_FIRST_PAUSES = 16  # of a model that are inspected; then the 32nd, the 64th …: every step may have one (a GAN, a rollout)
INPUTS_COMPARED = 4  # forwards of a pause: one input again and again is a sample of a random network, several are a dataset


@dataclass(slots=True)
class _Pause:
    step: int
    num: int  # of those of this model in training mode, from 1 on
    num_forwards: int = 0
    inputs: list[float] = field(default_factory=list)
    num_dropout: int = 0
    num_batch_norm: int = 0
    is_cumulative: bool = False  # batch norm that averages over all batches: its statistics are being computed anew
    line: str = ""  # of the user's code, which ran it first
    text: str = ""

    @property
    def is_inspected(self) -> bool:
        return self.num <= NUM_FIRST_PAUSES or self.num & (self.num - 1) == 0


class ForgottenEvalModeProbe(Probe):
    """Records pauses in which a trained model is evaluated in train mode."""

    name = "evaluation_in_train_mode"
    OBSERVED_CALLBACKS = Probe.OBSERVED_CALLBACKS | {"on_forward_start"}

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._trained: set[WatchedModel] = set()  # models that ran with gradients: a teacher that never does is no concern
        self._pauses: dict[WatchedModel, _Pause] = {}

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._state.model is not None:
            self._trained.add(self._state.model)

    def on_eval_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        watched, step = self._state.model, self._state.number
        if not module.training or watched is None or watched not in self._trained:
            return
        pause = self._pauses.get(watched)
        if pause is None or pause.step != step:
            self._record(watched, step)
            pause = self._pauses[watched] = _Pause(step, pause.num + 1 if pause is not None else 1)
            if pause.is_inspected:
                _count_modules(pause, module)
                pause.line, pause.text = describe_line(user_frame())
        pause.num_forwards += 1
        if pause.num_forwards <= INPUTS_COMPARED and pause.is_inspected:
            pause.inputs.append(_content(args, kwargs))

    def on_detach(self) -> None:
        for watched, pause in self._pauses.items():
            self._record(watched, pause.step)
            pause.step = -1  # recorded: what comes after is another one

    def _record(self, watched: WatchedModel, step: int) -> None:
        pause = self._pauses.get(watched)
        if pause is not None and pause.step >= 0 and pause.is_inspected:
            event = EvaluatedInTrainMode(
                model=watched.name, at_step=pause.step, num_pauses=pause.num, num_forwards=pause.num_forwards,
                num_inputs=len(set(pause.inputs)), input=pause.inputs[0], num_dropout=pause.num_dropout,
                num_batch_norm=pause.num_batch_norm, is_cumulative=pause.is_cumulative, num_models=len(self._trained), line=pause.line,
                text=pause.text,
            )  # fmt: skip
            self._recorder.emit(event, step)


def _count_modules(pause: _Pause, module: nn.Module) -> None:
    for part in module.modules():
        if part.training and depends_on_mode(part):
            if isinstance(part, BATCH_NORM):
                pause.num_batch_norm += 1
                pause.is_cumulative = pause.is_cumulative or part.momentum is None
            else:
                pause.num_dropout += 1


def _content(args: Any, kwargs: Any) -> float:
    """A number that tells inputs apart; on a device, where reading would wait, by their place in memory."""
    tensors: list[Tensor] = [tensor for _, tensor in find_tensors((args, kwargs))]
    if not tensors:
        return 0.0
    known = None if on_device(tensors[0]) else content_hash(tensors[0])
    return float(known if known is not None else id(tensors[0]))
