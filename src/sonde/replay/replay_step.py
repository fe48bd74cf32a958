"""Looking back: a loss or a gradient of the step under way is bad, nothing has used it yet, and the step is run again to see who made it.
So is a forward in evaluation whose output is bad.

First with every operation looked at, then on parts of the batch to find the samples that are to blame. Afterwards everything is as it
was, and training goes on as if nobody had looked. Where the step cannot be run again it says why, and answers with what is left: the
model alone, and the graph of the bad loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.replay_buffer import ReplayBuffer
from sonde.nonfinite.autograd_graph import origin_in_graph
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import NonFiniteTracer, compile_disabled, is_finite
from sonde.replay import distributed
from sonde.replay.backward_call_site import Part, parts_of
from sonde.replay.batch_slicing import given_to, picked
from sonde.replay.capsule.capsule import save_capsule
from sonde.replay.dataset_index import indices_of
from sonde.replay.failing_samples import culprits
from sonde.replay.gradient_accumulation import Earlier, Pick, earlier_batches
from sonde.replay.post_backward import made_afterwards
from sonde.replay.program_slice import CannotReplay
from sonde.replay.replay_evaluation import origin_of_evaluation, outputs_of
from sonde.replay.rerun import Rerun, gradients, reader
from sonde.replay.restore_state import as_before, modules_in
from sonde.statistics.tensor_utils import find_tensors

BLAMELESS = ("parameter", "buffer")  # phases in which no sample can be at fault

AFTERWARDS = "the gradients were good when backward had made them: it was made where your code changes them before the update"

def find_nonfinite_origin(
    kept: ReplayBuffer, *, frame: FrameType | None, loss: Tensor | None, what: str, models: Mapping[str, nn.Module] | None = None
) -> Origin | None:
    """Where the bad number of this step was made. `what` is bad: "loss", "gradient", or "evaluation", what the last call put out.

    None: the training deals with it itself, or it is an Inf that is meant. Raises `CannotReplay` where nothing is known.
    """
    if torch.compiler.is_compiling():
        return None
    models = models or {call.model: call.module for call in kept.calls}
    modules = [*models.values(), *(call.module for call in kept.calls), *modules_in(frame)]
    with as_before(modules), distributed.alone(modules), compile_disabled():
        found = _Look(kept, frame, loss, what, models).origin()
    num = distributed.num_processes()
    return replace(found, caveats=(*found.caveats, distributed.CAVEAT.format(num=num))) if found is not None and num > 1 else found


def save_step_capsule(
    kept: ReplayBuffer, directory: Path, *, frame: FrameType | None, what: str, optimizer: Any, origin: Origin,
    findings: Sequence[Mapping[str, Any]], max_mb: float,
) -> Path:  # fmt: skip
    """Keeps the step under way as a capsule: the model's last inputs, and what else the loss was made from."""
    if not kept.calls:
        raise CannotReplay("no forward of the model was seen in this step")
    blamed: Earlier | None = kept.blamed_batch
    call = blamed.calls[-1] if blamed else kept.calls[-1]
    inputs: dict[str, Any] = {}
    with contextlib.suppress(CannotReplay):
        for part in parts_of(frame, what, reader(kept), kept.loss_frame):
            found = {name: part.names[name] for name in part.slice.given if name in part.names}
            inputs |= {name: value for name, value in found.items() if not isinstance(value, nn.Module) and find_tensors(value)}
    inputs = blamed.then(None)(inputs, False) if blamed else inputs
    return save_capsule(
        directory, step=kept.step, model=call.module, args=call.args, kwargs=call.kwargs, optimizer=optimizer, rng=call.rng,
        loss_inputs=inputs, origin=origin, findings=findings, about={"what": what, "bad": kept.where}, max_mb=max_mb,
    )  # fmt: skip


class _Look:
    def __init__(
        self, kept: ReplayBuffer, frame: FrameType | None, loss: Tensor | None, what: str, models: Mapping[str, nn.Module]
    ) -> None:
        self.kept, self.frame, self.loss, self.what, self.models = kept, frame, loss, what, models
        self.reason = ""  # why the step, or a part of it, was not run again
        self.was_good = False  # it was run again, and no gradient was bad

    def origin(self) -> Origin | None:
        if self.what == "evaluation":
            return self._of_an_evaluation()
        parts: Sequence[Part] = ()
        try:
            parts = parts_of(self.frame, self.what, reader(self.kept), self.kept.loss_frame)
        except CannotReplay as error:
            self.reason = str(error)
        rerun = Rerun(self.kept, parts)
        if parts:
            found = self._of_the_step(rerun)
            if found is None and self.was_good:
                found, rerun = self._of_earlier_batches(rerun)
            if found is not None:
                if AFTERWARDS in found.caveats:
                    return found
                back = rerun.earlier.back if rerun.earlier else 0
                return _with_samples(found, given_to(rerun), partial(self._fails, found, rerun), back=back)
            if not self.reason:
                return None
        found = self._of_the_model(rerun)
        if found is None:
            raise CannotReplay(self.reason)
        return replace(found, caveats=(*found.caveats, self.reason))

    def _of_an_evaluation(self) -> Origin | None:
        call = self.kept.calls[-1]
        found = origin_of_evaluation(call, self.models)
        if found is None:
            return None
        inputs = given_to(Rerun(self.kept, ()))
        return _with_samples(found, inputs, lambda pick: not all(is_finite(output) for output in outputs_of(call, pick)))

    def _of_the_step(self, rerun: Rerun) -> Origin | None:
        """The step as a whole, every operation looked at: forward, then backward."""
        found: Origin | None = None
        try:
            with NonFiniteTracer(self.models) as tracer:
                loss = rerun()
                if not is_finite(loss):
                    found = tracer.origin_of(loss)
                elif self.what == "gradient":
                    bad = [gradient for gradient in gradients(loss) if not is_finite(gradient)]
                    found = tracer.origin_of(bad) if bad else None
        except Exception as error:  # the user's code, on a second run: whatever it raises is a reason not to trust it
            failed = f"running it again failed ({type(error).__name__}: {error})"[:500]
            self.reason = str(error) if isinstance(error, CannotReplay) else failed
            return None
        if found is None:
            if self.what == "loss" and self.kept.scaled and is_finite(loss):
                return None  # only the scaled loss overflowed: the scaler lowers its scale and goes on
            found, refused = self._afterwards(rerun)
            if found is not None:
                return replace(found, how="replayed", caveats=(*found.caveats, AFTERWARDS))
            self.was_good = self.what == "gradient"
            notes = [note for part in rerun.parts for note in part.slice.notes if "hands it out" not in note]
            notes = [refused, *notes] if refused else notes
            else_made = ": it went bad after that backward, or in an earlier one of this step" if self.what == "gradient" else ""
            else_made += ", or in another process" if else_made and distributed.num_processes() > 1 else ""
            came = f"its {self.what} was finite{else_made}" if is_finite(loss) else "its loss is bad, but what made it so was not run"
            self.reason = f"the step was run again and {came}" + "".join(f"; {note}" for note in notes[:3])
            return None
        return replace(found, how="replayed", caveats=(*found.caveats, *self._remarks(rerun, found)))

    def _of_earlier_batches(self, last: Rerun) -> tuple[Origin | None, Rerun]:
        """Gradients that are added up: the first micro-batch of this update that makes them bad."""
        for earlier in earlier_batches(list(self.kept.calls), last.num_calls):
            rerun = Rerun(self.kept, last.parts, earlier)
            try:
                with NonFiniteTracer(self.models) as tracer:
                    bad = [gradient for gradient in gradients(rerun()) if not is_finite(gradient)]
                    found = tracer.origin_of(bad) if bad else None
            except Exception:  # it cannot stand in for the last: another size, another branch
                continue
            if found is not None:
                self.kept.blamed_batch = earlier
                return replace(found, how="replayed", caveats=(*found.caveats, earlier.caveat)), rerun
        return None, last

    def _afterwards(self, rerun: Rerun) -> tuple[Origin | None, str]:
        """What the user's code did to the gradients after backward."""
        if self.what != "gradient" or self.frame is None or self.kept.scaled:  # unscaling belongs to the scaler
            return None, ""
        try:
            return made_afterwards(self.frame, rerun, self.models)
        except Exception as error:  # the user's code, on a second run
            return None, f"what was done to the gradients after backward could not be run again ({type(error).__name__}: {error})"[:300]

    def _remarks(self, rerun: Rerun, found: Origin) -> Iterator[str]:
        if found.phase not in ("forward", "backward"):
            for part in rerun.parts:
                yield from (note for note in part.slice.notes if "hands it out" not in note)

    def _of_the_model(self, rerun: Rerun) -> Origin | None:
        """What is left where the step cannot be run: the model on its inputs, and the graph of the bad loss."""
        found: Origin | None = None
        try:
            with NonFiniteTracer(self.models) as tracer:
                bad = [output for output in rerun.outputs() if not is_finite(output)]
                found = tracer.origin_of(bad) if bad else None
        except Exception as error:
            self.reason = self.reason or f"the model could not be run again ({type(error).__name__}: {error})"[:500]
        if found is not None:
            return replace(found, how="replayed")
        return origin_in_graph(self.loss) if self.loss is not None else None

    def _fails(self, found: Origin, rerun: Rerun, pick: Pick) -> bool:
        loss = rerun(pick)
        if found.phase != "backward":
            return not is_finite(loss)
        return is_finite(loss) and not all(is_finite(gradient) for gradient in gradients(loss))


def _with_samples(found: Origin, inputs: Sequence[Tensor], fails: Callable[[Pick], bool], *, back: int = 0) -> Origin:
    """The origin, with the samples that trigger it. `fails` runs it on what is picked of the batch, which came so many before the last."""
    first = next(iter(inputs), None)
    if first is None or found.phase in BLAMELESS:
        return found

    def of_group(num: int, dim: int, group: Sequence[int]) -> bool:
        return fails(lambda value, flat: picked(value, torch.tensor(group), num, dim, flat=flat))

    num = first.shape[0]
    told = culprits(num, partial(of_group, num, 0))
    if told.samples is None and "could not be run" in told.note and first.dim() > 2:  # the batch may come second, after time
        other = culprits(first.shape[1], partial(of_group, first.shape[1], 1))
        num, told = (first.shape[1], other) if other.samples is not None else (num, told)
    if told.samples is None:
        return found if not told.note else replace(found, caveats=(*found.caveats, told.note))
    indices = indices_of(told.samples, inputs, num, back=back)
    return replace(found, samples=told.samples, indices=indices, caveats=(*found.caveats, *([told.note] if told.note else [])))
