"""The Trainer of transformers: `Trainer(..., callbacks=[SondeCallback()])`.

The Trainer clips gradients before `on_pre_optimizer_step`; the run holds them as the optimizer is given them. Where gradients are
accumulated, the Trainer divides each loss; the run holds it undivided. It tells nobody of an exception: the run is then closed when the
program ends, with the exception, or at once where the training stands in `with SondeCallback() as callback:`.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from sonde.errors import SondeError
from sonde.events import FrameworkEpochStarted, FrameworkTrainingEnded, FrameworkTrainingStarted
from sonde.integrations.watching import GRADIENTS, Watching, contained


class SondeCallback(Watching):
    """Watches `trainer.train`: `callback.report()` says what was found, `callback.run` is where it is written."""

    framework = "transformers"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._divided_by = 1.0

    @classmethod
    def bases(cls) -> tuple[type, ...]:
        try:
            from transformers import TrainerCallback
        except ModuleNotFoundError as error:
            raise SondeError(
                f"SondeCallback needs transformers, and {error.name} is not installed here. Install it with: pip install transformers"
            ) from error
        return (TrainerCallback,)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        import transformers

        from sonde import framework_hints

        optimizer = innermost(given.get("optimizer"))
        session = self._begin(given["model"], optimizer, package="transformers", package_version=transformers.__version__)
        self._divided_by = 1.0
        framework_hints.calls_backward(session)
        framework_hints.divides_losses(session, lambda: self._divided_by)
        clips = float(args.max_grad_norm or 0)
        started = FrameworkTrainingStarted(
            framework=self.framework, gradients=GRADIENTS, clipping="clipped" if clips > 0 else "unclipped",
            clips_at=clips, clips_by="norm" if clips > 0 else "", num_accumulated=args.gradient_accumulation_steps,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else "32", max_steps=state.max_steps, max_epochs=state.num_train_epochs,
            resumed_at=state.global_step, epoch=state.epoch or 0, rank=args.process_index, world_size=args.world_size,
        )  # fmt: skip
        self._emit(started)

    @contained
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._emit(FrameworkEpochStarted(epoch=round(state.epoch or 0), framework_step=state.global_step))

    @contained
    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._divided_by = float(num_batches_of_step(args.gradient_accumulation_steps, state.global_step, given.get("train_dataloader")))

    @contained
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        # Its norm of the gradients is the one from before clipping.
        self._log({"grad_norm_unclipped" if name == "grad_norm" else name: value for name, value in (logs or {}).items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        early = state.global_step < state.max_steps
        self._emit(FrameworkTrainingEnded(framework_step=state.global_step, epoch=state.epoch or 0, has_stopped_early=early))
        self._end()


def num_batches_of_step(accumulates: int, num_steps: int, loader: Any) -> int:
    """How many batches make the step after `num_steps` others: the last one of an epoch may have fewer."""
    if accumulates == 1:
        return 1
    try:
        num_batches = len(loader)
    except TypeError:  # a stream
        return accumulates
    of_epoch = num_steps % max(1, ceil(num_batches / accumulates))
    return max(1, min(accumulates, num_batches - of_epoch * accumulates))


def innermost(optimizer: Any) -> Any:
    """Without the wrapper of accelerate, which never steps itself."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer
