"""Replays the current step to find the operation that made a non-finite loss, gradient or evaluation output.

The step runs again in a copy of the process (`forked_child`): first with every operation traced, then on parts of the batch to find the
responsible samples. If the step cannot run again, the model runs alone, and else the graph of the loss is searched; caveats of the result
say why.

Of an evaluation the model is all that can run. A NaN there is always reported. An Inf is reported only if a value overflowed or was
divided by 0: code masks logits with -Inf, and the logarithm of a probability of 0 is -Inf.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.step_inputs_for_replay import ForwardCall, ReplayBuffer
from sonde.errors import CannotReplay
from sonde.nonfinite.operation_tracer import NonFiniteTracer, compile_disabled, is_finite
from sonde.nonfinite.origin_from_graph import origin_in_graph
from sonde.nonfinite.origin_types import Origin
from sonde.replay.bisect_batch import find_failing_samples
from sonde.replay.capsule.capsule_file import CapsuleFiles
from sonde.replay.capsule.create_capsule import pack_capsule
from sonde.replay.capsule.replay_capsule_with_model import with_caveats
from sonde.replay.dataset_indices_of_samples import dataset_indices
from sonde.replay.earlier_micro_batches import EarlierBatch, Select, earlier_batches
from sonde.replay.prevent_side_effects import describe_failure
from sonde.replay.replay_without_other_ranks import caveats_of_ranks, forbid_collectives, num_processes, without_ddp
from sonde.replay.rerun_statements import Rerun, gradients, value_queries
from sonde.replay.select_samples_of_batch import select_samples, step_inputs
from sonde.replay.statements_after_backward import find_origin_after_backward
from sonde.replay.statements_that_compute_loss import FrameSlice, slices_up_to_backward
from sonde.statistics.find_tensors import find_tensors

PHASES_WITHOUT_SAMPLES = ("parameter", "buffer")  # the number was bad before the batch came
CHANGED_AFTER_BACKWARD = "the gradients were finite after backward: your code between backward and the update made them non-finite"
# Defects (`Origin.key`) that never make an Inf on purpose. The logarithm is not among them: log(0) of a probability may be intended.
NEVER_INTENDED = frozenset({"overflow", "fp16-overflow", "exp-overflow", "unstable-softmax", "division-by-zero"})


def find_nonfinite_origin(
    buffer: ReplayBuffer, *, frame: FrameType | None, loss: Tensor | None, what: str, models: Mapping[str, nn.Module]
) -> Origin | None:
    """Finds the operation that made a number of the current step non-finite.

    Args:
        buffer: the recorded step.
        frame: the function of the user that called `backward`.
        loss: the non-finite loss, if there is one; its graph is searched if nothing can run again.
        what: what is non-finite: "loss", "gradient", or "evaluation" (the output of the last recorded call).
        models: the watched models by name.

    Returns None if a GradScaler handles the number, or if it is an intended Inf. Raises `CannotReplay` if no origin can be found.
    """
    if torch.compiler.is_compiling():
        return None
    modules = [*models.values(), *(call.module for call in buffer.calls)]
    with without_ddp(modules), compile_disabled():
        found = _NonFiniteReplay(buffer, frame, loss, what, models).find_origin()
    return found and replace(found, caveats=(*found.caveats, *caveats_of_ranks()))


def write_step_capsule(
    files: CapsuleFiles, buffer: ReplayBuffer, *, frame: FrameType | None, what: str, optimizer: Any, origin: Origin,
    findings: Sequence[Mapping[str, Any]], max_mb: float,
) -> None:  # fmt: skip
    """Writes the last recorded forward call, or that of the micro-batch that a replay found (`buffer.blamed_batch`), and the other tensors
    that the loss is computed from into the files of a capsule. Raises `CannotReplay` if no forward was recorded."""
    if not buffer.calls:
        raise CannotReplay("no forward of the model was recorded in this step")
    earlier: EarlierBatch | None = buffer.blamed_batch
    call = earlier.calls[-1] if earlier else buffer.calls[-1]
    loss_inputs: dict[str, Any] = {}
    with contextlib.suppress(CannotReplay):
        for part in slices_up_to_backward(frame, what, value_queries(buffer), buffer.loss_frame):
            values = {name: part.variables[name] for name in part.slice.inputs if name in part.variables}
            loss_inputs |= {name: value for name, value in values.items() if not isinstance(value, nn.Module) and find_tensors(value)}
    loss_inputs = earlier.replace_last(None)(loss_inputs, False) if earlier else loss_inputs
    description, tensors = pack_capsule(
        step=buffer.step, model=call.module, args=call.args, kwargs=call.kwargs, optimizer=optimizer, rng=call.rng,
        loss_inputs=loss_inputs, origin=origin, findings=findings, about={"what": what, "bad": buffer.where}, max_mb=max_mb,
    )  # fmt: skip
    files.write(description, tensors)


class _NonFiniteReplay:
    """Replays one step and searches the origin of its non-finite number."""

    def __init__(
        self, buffer: ReplayBuffer, frame: FrameType | None, loss: Tensor | None, what: str, models: Mapping[str, nn.Module]
    ) -> None:
        self.buffer, self.frame, self.loss, self.what, self.models = buffer, frame, loss, what, models
        self.reason = ""  # why the step, or a part of it, was not run again
        self.had_finite_gradients = False  # the step ran again, and all of its gradients were finite

    def find_origin(self) -> Origin | None:
        if self.what == "evaluation":
            return self._replay_evaluation()
        slices: Sequence[FrameSlice] = ()
        try:
            slices = slices_up_to_backward(self.frame, self.what, value_queries(self.buffer), self.buffer.loss_frame)
        except CannotReplay as error:
            self.reason = str(error)
        rerun = Rerun(self.buffer, slices)
        if slices:
            found = self._replay_whole_step(rerun)
            if not rerun.num_calls and self.buffer.calls:  # the loss is made from outputs that the model gave before, in a rollout
                found = self._replay_forwards(rerun) or found
            if found is None and self.had_finite_gradients:
                found, rerun = self._replay_earlier_batches(rerun)
            if found is not None:
                if CHANGED_AFTER_BACKWARD in found.caveats:
                    return found
                batches_ago = rerun.earlier.batches_ago if rerun.earlier else 0
                return _with_samples(found, step_inputs(rerun), partial(self._fails, found, rerun), batches_ago=batches_ago)
            if not self.reason:
                return None
        found = self._replay_forwards(rerun) or (origin_in_graph(self.loss) if self.loss is not None else None)
        if found is None:
            raise CannotReplay(self.reason)
        return replace(found, caveats=(*found.caveats, self.reason))

    def _replay_evaluation(self) -> Origin | None:
        """The origin in the last recorded forward; None if its output is an intended Inf."""
        call = self.buffer.calls[-1]
        try:
            with NonFiniteTracer(self.models) as tracer:
                bad = [output for output in _outputs_of(call) if not is_finite(output)]
                found = tracer.origin_of(bad)
                has_nan = any(bool(output.isnan().any()) for output in bad)
        except CannotReplay:
            raise
        except Exception as error:  # raised by the user's code in the replay
            raise CannotReplay(f"the model could not be run again ({type(error).__name__}: {error})"[:500]) from error
        if not bad:
            raise CannotReplay("the model was run again and its output was finite: it depends on state outside of the model")
        if not has_nan and (found is None or not (found.key in NEVER_INTENDED or found.phase == "parameter")):
            return None
        if found is None:
            raise CannotReplay("the model was run again and its output was not finite, but no traced operation made it so")
        inputs = step_inputs(Rerun(self.buffer, ()))
        found = replace(found, how="replayed")
        return _with_samples(found, inputs, lambda select: not all(map(is_finite, _outputs_of(call, select))))

    def _replay_whole_step(self, rerun: Rerun) -> Origin | None:
        """Runs forward, loss and backward with every operation traced. Sets `reason` if that finds nothing."""
        found: Origin | None = None
        try:
            with NonFiniteTracer(self.models) as tracer:
                loss = rerun()
                if not is_finite(loss):
                    found = tracer.origin_of(loss)
                elif self.what == "gradient":
                    found = tracer.origin_of(gradients(loss))
        except Exception as error:  # raised by the user's code in the replay: its result cannot be trusted
            self.reason = describe_failure(error)
            return None
        if found is not None:
            notes = [] if found.phase in ("forward", "backward") else rerun.notes
            return with_caveats(found, notes)
        if self.what == "loss" and self.buffer.scaled and is_finite(loss):
            return None  # only the scaled loss overflowed: the GradScaler lowers its scale and continues
        found, not_replayed = self._replay_after_backward(rerun)
        if found is not None:
            return with_caveats(found, [CHANGED_AFTER_BACKWARD])
        self.had_finite_gradients = self.what == "gradient"
        self.reason = self._why_nothing_was_found(is_finite(loss), [not_replayed, *rerun.notes] if not_replayed else rerun.notes)
        return None

    def _why_nothing_was_found(self, has_finite_loss: bool, notes: Sequence[str]) -> str:
        outcome = f"its {self.what} was finite"
        if not has_finite_loss:
            outcome = "its loss is not finite, but the operation that made it so did not run again"
        elif self.what == "gradient":
            outcome += ": it became non-finite after that backward, or in an earlier one of this step"
            outcome += ", or in another process" if num_processes() > 1 else ""
        return f"the step was run again and {outcome}" + "".join(f"; {note}" for note in notes[:3])

    def _replay_earlier_batches(self, last: Rerun) -> tuple[Origin | None, Rerun]:
        """The origin in the first micro-batch of an accumulated gradient that makes it non-finite, and the replay of that micro-batch."""
        for earlier in earlier_batches(list(self.buffer.calls), last.num_calls):
            rerun = Rerun(self.buffer, last.slices, earlier)
            try:
                with NonFiniteTracer(self.models) as tracer:
                    found = tracer.origin_of(gradients(rerun()))
            except Exception:  # it cannot replace the last micro-batch: another size, another branch
                continue
            if found is not None:
                self.buffer.blamed_batch = earlier
                return with_caveats(found, [earlier.caveat]), rerun
        return None, last

    def _replay_after_backward(self, rerun: Rerun) -> tuple[Origin | None, str]:
        """The origin in statements that change the gradients after backward, or None and why these did not run."""
        if self.what != "gradient" or self.frame is None or self.buffer.scaled:  # the GradScaler unscales the gradients
            return None, ""
        try:
            return find_origin_after_backward(self.frame, rerun, self.models)
        except Exception as error:  # raised by the user's code in the replay
            return None, f"running the statements after backward again failed ({type(error).__name__}: {error})"[:300]

    def _replay_forwards(self, rerun: Rerun) -> Origin | None:
        """The origin in the first recorded forward with a non-finite output. Sets `reason` if they cannot run."""
        try:
            for index in range(max(1, len(self.buffer.calls))):
                with NonFiniteTracer(self.models) as tracer:
                    found = tracer.origin_of(rerun.model_outputs(index))
                if found is not None:
                    return replace(found, how="replayed")
        except Exception as error:  # raised by the user's code in the replay
            self.reason = self.reason or f"the model could not be run again ({type(error).__name__}: {error})"[:500]
        return None

    def _fails(self, found: Origin, rerun: Rerun, select: Select) -> bool:
        """Whether the selected samples make the number non-finite in the same phase."""
        loss = rerun(select)
        if found.phase != "backward":
            return not is_finite(loss)
        return is_finite(loss) and not all(map(is_finite, gradients(loss)))


def _outputs_of(call: ForwardCall, select: Select = lambda value, flat: value) -> list[Tensor]:
    """The outputs of a recorded forward call, run on the inputs that `select` returns."""
    torch.set_rng_state(call.rng)
    with forbid_collectives():
        output = call.module(*select(call.args, True), **select(dict(call.kwargs), True))
    return [tensor for _, tensor in find_tensors(output) if tensor.is_floating_point()]


def _with_samples(found: Origin, inputs: Sequence[Tensor], fails: Callable[[Select], bool], *, batches_ago: int = 0) -> Origin:
    """The origin with the samples that cause it. `fails` replays the step on selected samples."""
    first = next(iter(inputs), None)
    if first is None or found.phase in PHASES_WITHOUT_SAMPLES:
        return found

    def group_fails(num: int, dim: int, group: Sequence[int]) -> bool:
        return fails(lambda value, flat: select_samples(value, torch.tensor(group), num, dim, flat=flat))

    num = first.shape[0]
    failing = find_failing_samples(num, partial(group_fails, num, 0))
    if failing.samples is None and "could not be run" in failing.note and first.dim() > 2:  # dimension 0 may be time
        other = find_failing_samples(first.shape[1], partial(group_fails, first.shape[1], 1))
        num, failing = (first.shape[1], other) if other.samples is not None else (num, failing)
    if failing.samples is None:
        return found if not failing.note else replace(found, caveats=(*found.caveats, failing.note))
    indices = dataset_indices(failing.samples, inputs, num, batches_ago=batches_ago)
    return replace(found, samples=failing.samples, indices=indices, caveats=(*found.caveats, *([failing.note] if failing.note else [])))
