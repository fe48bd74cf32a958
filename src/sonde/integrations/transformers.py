"""The Trainer of transformers: `Trainer(..., callbacks=[SondeCallback()])`.

The Trainer clips gradients before `on_pre_optimizer_step`; the run holds the gradients that the optimizer uses. With gradient accumulation
the Trainer divides each loss; the run holds the undivided loss. The Trainer has no callback for exceptions: the run is closed with the
exception when the program ends, or at once if the training runs in `with SondeCallback() as callback:`.
"""

from math import ceil
from typing import Any

from sonde.events import FrameworkEpochStarted, FrameworkTrainingEnded, FrameworkTrainingStarted
from sonde.integrations.integration_base import GRADIENTS, FrameworkIntegration, import_base, isolated_hook


class SondeCallback(FrameworkIntegration):
    """Watches `trainer.train`; `callback.report()` returns the report, `callback.run` the path of the run."""

    framework = "transformers"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._loss_divisor = 1.0

    @classmethod
    def bases(cls) -> tuple[type, ...]:
        return (import_base("transformers", "TrainerCallback", "SondeCallback"),)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import transformers

        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        session = self._begin(kwargs["model"], optimizer, package="transformers", package_version=transformers.__version__)
        self._loss_divisor = 1.0
        session.set_hints(library_calls_backward=True, loss_divisor=lambda: self._loss_divisor)
        clips = float(args.max_grad_norm or 0)
        event = FrameworkTrainingStarted(
            framework=self.framework, gradients=GRADIENTS, clipping="clipped" if clips > 0 else "unclipped",
            clips_at=clips, clips_by="norm" if clips > 0 else "", num_accumulated=args.gradient_accumulation_steps,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else "32", max_steps=state.max_steps, max_epochs=state.num_train_epochs,
            resumed_at=state.global_step, epoch=state.epoch or 0, rank=args.process_index, world_size=args.world_size,
        )  # fmt: skip
        self._emit(event)

    @isolated_hook
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._emit(FrameworkEpochStarted(epoch=round(state.epoch or 0), framework_step=state.global_step))

    @isolated_hook
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loss_divisor = float(num_batches_of_step(args.gradient_accumulation_steps, state.global_step, kwargs.get("train_dataloader")))

    @isolated_hook
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # The Trainer logs the gradient norm before clipping.
        self._log({"grad_norm_unclipped" if name == "grad_norm" else name: value for name, value in (logs or {}).items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        early = state.global_step < state.max_steps
        self._emit(FrameworkTrainingEnded(framework_step=state.global_step, epoch=state.epoch or 0, has_stopped_early=early))
        self._end()


def num_batches_of_step(accumulates: int, num_steps: int, loader: Any) -> int:
    """The number of batches in the step after `num_steps` others; the last step of an epoch may have fewer."""
    if accumulates == 1:
        return 1
    try:
        num_batches = len(loader)
    except TypeError:  # an iterable dataset
        return accumulates
    of_epoch = num_steps % max(1, ceil(num_batches / accumulates))
    return max(1, min(accumulates, num_batches - of_epoch * accumulates))


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrapper, which does not step itself."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer
