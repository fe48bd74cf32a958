"""A forward in evaluation that put out a bad number, run again to see who made it and for which samples.

Nothing follows from such an output, so the model is all there is to run: on the same inputs, in the same modes, with the same random
numbers. NaN is never meant. Inf may be, unless a number outgrew its type or was divided by 0: logits are masked with -Inf, and the
logarithm of a probability of 0 is -Inf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.replay_buffer import ForwardCall
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import NonFiniteTracer, is_finite
from sonde.replay.distributed import silence
from sonde.replay.program_slice import CannotReplay
from sonde.statistics.tensor_utils import find_tensors

# Defects by their keys: an Inf that they make is never meant. That of a logarithm may be: the probability of what cannot be is 0.
NEVER_MEANT = frozenset({"overflow", "fp16-overflow", "exp-overflow", "unstable-softmax", "division-by-zero"})


def origin_of_evaluation(call: ForwardCall, models: Mapping[str, nn.Module]) -> Origin | None:
    """Where the bad output of this call was made. None: it is an Inf that is meant. Runs inside `restore.as_before`."""
    try:
        with NonFiniteTracer(models) as tracer:
            bad = [output for output in outputs_of(call) if not is_finite(output)]
            found = tracer.origin_of(bad)
            is_nan = any(bool(output.isnan().any()) for output in bad)
    except CannotReplay:
        raise
    except Exception as error:  # the user's code, on a second run
        raise CannotReplay(f"the model could not be run again ({type(error).__name__}: {error})"[:500]) from error
    if not bad:
        raise CannotReplay("the model was run again and its output was finite: it depends on something outside of the model")
    if not is_nan and (found is None or not (found.key in NEVER_MEANT or found.phase == "parameter")):
        return None
    if found is None:
        raise CannotReplay("the model was run again and its output was bad, but no operation was seen to make it so")
    return replace(found, how="replayed")


def outputs_of(call: ForwardCall, pick: Callable[[Any, bool], Any] = lambda value, flat: value) -> list[Tensor]:
    """What the model puts out on these inputs, or on what `pick` makes of them."""
    torch.set_rng_state(call.rng)
    with silence():
        output = call.module(*pick(call.args, True), **pick(dict(call.kwargs), True))
    return [tensor for _, tensor in find_tensors(output) if tensor.is_floating_point()]
