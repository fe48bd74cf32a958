"""A GradScaler skipped a step: which operation made the Inf, and was it the scale, or a number that no scale can help?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from torch import nn

from sonde.capture.replay_buffer import ReplayBuffer
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import NonFiniteTracer, is_finite
from sonde.replay.backward_call_site import parts_of
from sonde.replay.distributed import alone
from sonde.replay.program_slice import CannotReplay
from sonde.replay.replay_step import find_nonfinite_origin
from sonde.replay.rerun import Rerun, gradients, gradients_by_leaf, reader
from sonde.replay.restore_state import as_before, modules_in


@dataclass(frozen=True, slots=True)
class Overflow:
    by: str  # "scale": the gradients are finite without it; "number": they are not; "": it is not known
    origin: Origin | None = None
    reason: str = ""  # why there is no origin


def explain_overflow(
    kept: ReplayBuffer, *, frame: FrameType | None, scale: float, models: Mapping[str, nn.Module] | None = None
) -> Overflow:
    """Where the gradients of this step, which a GradScaler of this scale refused, went bad. Everything is left as it was."""
    models = models or {call.model: call.module for call in kept.calls}
    modules = [*models.values(), *(call.module for call in kept.calls), *modules_in(frame)]
    with as_before(modules), ExitStack() as stack:
        try:
            stack.enter_context(alone(modules))
            rerun = Rerun(kept, parts_of(frame, "gradient", reader(kept)))
            rerun.refuse_loans()
            loss = rerun()
            if not is_finite(loss) or not all(map(is_finite, gradients(loss))):
                return Overflow("number", find_nonfinite_origin(kept, frame=frame, loss=None, what="gradient", models=models))
            with NonFiniteTracer(models) as tracer:
                bad = [gradient for _, gradient in gradients_by_leaf(rerun(), scale) if not is_finite(gradient)]
                origin = tracer.origin_of(bad) if bad else None
        except CannotReplay as error:
            return Overflow("", reason=str(error))
        except Exception as error:  # the user's code, on a second run
            return Overflow("", reason=f"running the step again failed ({type(error).__name__}: {error})"[:500])
    if not bad:
        return Overflow("", reason="the step was run again and its gradients were finite, scaled and not")
    return Overflow("scale", origin)
