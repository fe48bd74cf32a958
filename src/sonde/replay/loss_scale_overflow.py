"""Explains a step that a GradScaler skipped: the operation that made the Inf, and whether the loss scale or a value caused it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from torch import nn

from sonde.capture.step_inputs_for_replay import ReplayBuffer
from sonde.nonfinite.operation_tracer import NonFiniteTracer, compile_disabled, is_finite
from sonde.nonfinite.origin_types import Origin
from sonde.replay.find_origin_by_replay import find_nonfinite_origin
from sonde.replay.prevent_side_effects import describe_failure
from sonde.replay.replay_without_other_ranks import without_ddp
from sonde.replay.rerun_statements import Rerun, gradients, gradients_by_leaf, value_queries
from sonde.replay.statements_that_compute_loss import slices_up_to_backward


@dataclass(frozen=True, slots=True)
class OverflowExplanation:
    """Why the gradients of a step overflowed."""

    by: str  # "scale": they are finite without the loss scale; "number": they are not; "": unknown
    origin: Origin | None = None
    reason: str = ""  # why there is no origin


def explain_overflow(
    buffer: ReplayBuffer, *, frame: FrameType | None, scale: float, models: Mapping[str, nn.Module]
) -> OverflowExplanation:
    """Explains why the gradients of the recorded step are not finite. It is replayed without the loss scale `scale` of the GradScaler, and
    with it if the gradients are finite then. Call it in a copy of the process. `frame` is the function of the user that called `backward`,
    `models` are the watched models by name."""
    try:
        with without_ddp([*models.values(), *(call.module for call in buffer.calls)]), compile_disabled():
            rerun = Rerun(buffer, slices_up_to_backward(frame, "gradient", value_queries(buffer)))
            loss = rerun()
            if not is_finite(loss) or not all(map(is_finite, gradients(loss))):
                return OverflowExplanation("number", find_nonfinite_origin(buffer, frame=frame, loss=None, what="gradient", models=models))
            with NonFiniteTracer(models) as tracer:
                bad = [gradient for _, gradient in gradients_by_leaf(rerun(), scale) if not is_finite(gradient)]
                origin = tracer.origin_of(bad)
    except Exception as error:  # `CannotReplay`, or raised by the user's code in the replay
        return OverflowExplanation("", reason=describe_failure(error))
    if not bad:
        return OverflowExplanation("", reason="the step was run again and its gradients were finite, with and without the loss scale")
    return OverflowExplanation("scale", origin)
