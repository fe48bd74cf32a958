"""Accelerate: `Accelerator(log_with=SondeTracker())`, then `init_trackers` and `end_training` as with any tracker.

From `init_trackers` on all models that train are watched, in every process, and values of `accelerator.log` are recorded. With gradient
accumulation `accelerator.backward` divides each loss; the run holds the undivided loss.
"""

from collections.abc import Mapping
from typing import Any

from sonde.events import FrameworkTrainingStarted, TrackerConfigured
from sonde.integrations.integration_base import GRADIENTS, FrameworkIntegration, import_base, isolated_hook
from sonde.integrations.transformers import unwrap_optimizer


class SondeTracker(FrameworkIntegration):
    """Watches a training loop of accelerate; `tracker.report()` returns the report, `tracker.run` the path of the run. With a model, only
    its training is watched; without one, all models that train."""

    framework = "accelerate"
    name = "sonde"  # this and the next two are required by accelerate
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, model: Any = None, optimizer: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._model, self._optimizer = model, unwrap_optimizer(optimizer)

    @classmethod
    def bases(cls) -> tuple[type, ...]:
        return (import_base("accelerate.tracking", "GeneralTracker", "SondeTracker"),)

    @property
    def tracker(self) -> Any:
        return self.session

    def start(self) -> None:
        import accelerate
        from accelerate.state import AcceleratorState, GradientState

        session = self._begin(self._model, self._optimizer, package="accelerate", package_version=accelerate.__version__)
        gradients, state = GradientState(), AcceleratorState()
        session.set_hints(loss_divisor=lambda: float(gradients.num_steps))
        event = FrameworkTrainingStarted(
            framework=self.framework, gradients=GRADIENTS, clipping="where the loop clips", clips_at=0, clips_by="",
            num_accumulated=gradients.num_steps, precision=str(state.mixed_precision), strategy=str(state.distributed_type),
            rank=state.process_index, world_size=state.num_processes, resumed_at=0, epoch=0,
        )  # fmt: skip
        self._emit(event)

    @isolated_hook
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        known = {name: value for name, value in values.items() if value is None or isinstance(value, (bool, int, float, str))}
        self._emit(TrackerConfigured(values=known))

    @isolated_hook
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._log(values)

    def finish(self) -> None:
        self._end()
