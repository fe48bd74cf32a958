"""Lightning: `Trainer(callbacks=[SondeCallback()])`, under either name of the package, `lightning` and `pytorch_lightning`.

Lightning clips gradients after `on_before_optimizer_step`; the run holds the gradients that the optimizer uses, after clipping. With
gradient accumulation Lightning divides each loss; the run holds the undivided loss. The sanity check is not watched.
"""

import sys
import weakref
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sonde.errors import SondeError
from sonde.events import FrameworkEpochStarted, FrameworkTrainingEnded, FrameworkTrainingStarted
from sonde.integrations.integration_base import GRADIENTS, FrameworkIntegration, isolated_hook

NAMES = ("lightning.pytorch", "pytorch_lightning")  # two packages with unrelated base classes
UNUSED = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


class SondeCallback(FrameworkIntegration):
    """Watches `trainer.fit`; `callback.report()` returns the report, `callback.run` the path of the run."""

    framework = "lightning"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._pause = ExitStack()  # closed at the end of the sanity check
        self._logged: dict[str, Any] = {}  # Lightning passes all metrics every time; new values are other objects
        self._trainer: weakref.ref[Any] | None = None
        # Lightning needs a dozen calls for a hook that does nothing, in every batch; it skips hooks that are None.
        empty = [getattr(base, hook, None) for base in self.bases() for hook in UNUSED]
        for hook in UNUSED:
            if getattr(type(self), hook, None) in empty:  # not overridden in a subclass
                setattr(self, hook, None)

    @classmethod
    def bases(cls) -> tuple[type, ...]:
        loaded = [sys.modules[name] for name in NAMES if name in sys.modules] or [_first_installed()]
        return tuple(package.Callback for package in loaded)

    @classmethod
    def class_attributes(cls) -> dict[str, Any]:
        is_own = cls.on_train_batch_end is SondeCallback.on_train_batch_end
        return {"on_train_batch_end": _HookWhenDue()} if is_own else {}

    def __reduce__(self) -> Any:
        make, args, state = super().__reduce__()
        return make, args, {**state, "_trainer": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        # Before the optimizers are created, so that the line that creates them is recorded.
        self._trainer = weakref.ref(trainer)
        package = sys.modules[type(trainer).__module__.partition(".")[0]]
        session = self._begin(pl_module, package=package.__name__, package_version=package.__version__)
        session.find_entry_points(pl_module)
        session.set_hints(has_single_closures=True, library_calls_backward=True)
        if pl_module.automatic_optimization:
            session.set_hints(loss_divisor=lambda: float(trainer.accumulate_grad_batches))

    @isolated_hook
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        if self.session is not None:
            self._pause.enter_context(self.session.pause())

    @isolated_hook
    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._pause.close()

    @isolated_hook
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        clips = trainer.gradient_clip_val
        event = FrameworkTrainingStarted(
            framework=self.framework, gradients=GRADIENTS, clipping="clipped" if clips else "unclipped",
            clips_at=clips or 0, clips_by=str(trainer.gradient_clip_algorithm or "norm") if clips else "",
            num_accumulated=trainer.accumulate_grad_batches, precision=str(trainer.precision), strategy=type(trainer.strategy).__name__,
            is_automatic=pl_module.automatic_optimization, max_steps=trainer.max_steps, max_epochs=trainer.max_epochs,
            resumed_at=trainer.global_step, epoch=trainer.current_epoch, rank=trainer.global_rank, world_size=trainer.world_size,
        )  # fmt: skip
        self._emit(event)

    @isolated_hook
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._log_new(trainer)  # of the epoch before: not known yet when it ends
        self._emit(FrameworkEpochStarted(epoch=trainer.current_epoch, framework_step=trainer.global_step))

    @isolated_hook
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._is_due():
            self._log_new(trainer)

    @isolated_hook
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._log_new(trainer)

    @isolated_hook
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log_new(trainer)
        event = FrameworkTrainingEnded(
            framework_step=trainer.global_step, epoch=trainer.current_epoch, has_stopped_early=bool(trainer.should_stop)
        )
        self._emit(event)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(exception)

    def _end(self, error: BaseException | None = None, **how: Any) -> None:
        self._pause.close()
        self._logged.clear()
        super()._end(error, **how)

    def _is_due(self) -> bool:
        """Whether Lightning logs at this step."""
        trainer = self._trainer() if self._trainer is not None else None
        return trainer is not None and trainer.global_step % max(1, trainer.log_every_n_steps) == 0

    def _log_new(self, trainer: Any) -> None:
        metrics = dict(trainer.callback_metrics)
        self._log({name: value for name, value in metrics.items() if self._logged.get(name) is not value})
        self._logged = metrics


class _HookWhenDue:
    """Descriptor of `on_train_batch_end`: None, which Lightning skips, except for batches that Lightning logs."""

    def __get__(self, callback: SondeCallback | None, of: type | None = None) -> Any:
        if callback is None:
            return SondeCallback.on_train_batch_end
        return SondeCallback.on_train_batch_end.__get__(callback) if callback._is_due() else None


def _first_installed() -> Any:
    for name in NAMES:
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name)
    raise SondeError("SondeCallback needs Lightning, which is not installed here. Install it with: pip install lightning")
