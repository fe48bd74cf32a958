"""Accelerate: `Accelerator(log_with=SondeTracker())`, then `init_trackers` and `end_training` as with any tracker.

From `init_trackers` on whatever trains is watched, in every process; `accelerator.log` is kept. Gradients are held as the optimizer is
given them: clipped, where the loop clips. Where gradients are accumulated, `accelerator.backward` divides each loss; the run holds it
undivided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.errors import SondeError
from sonde.events import FrameworkTrainingStarted, TrackerConfigured
from sonde.integrations.transformers import innermost
from sonde.integrations.watching import GRADIENTS, Watching, contained


class SondeTracker(Watching):
    """Watches a loop of accelerate: `tracker.report()` says what was found, `tracker.run` is where it is written.

    With a model, only its training is watched; without, whatever trains.
    """

    framework = "accelerate"
    name = "sonde"  # what follows is what accelerate asks of a tracker
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, model: Any = None, optimizer: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._model, self._optimizer = model, innermost(optimizer)

    @classmethod
    def bases(cls) -> tuple[type, ...]:
        try:
            from accelerate.tracking import GeneralTracker
        except ModuleNotFoundError as error:
            raise SondeError(
                f"SondeTracker needs accelerate, and {error.name} is not installed here. Install it with: pip install accelerate"
            ) from error
        return (GeneralTracker,)

    @property
    def tracker(self) -> Any:
        return self.session

    def start(self) -> None:
        import accelerate
        from accelerate.state import AcceleratorState, GradientState

        from sonde import framework_hints

        session = self._begin(self._model, self._optimizer, package="accelerate", package_version=accelerate.__version__)
        gradients, state = GradientState(), AcceleratorState()
        framework_hints.divides_losses(session, lambda: float(gradients.num_steps))
        started = FrameworkTrainingStarted(
            framework=self.framework, gradients=GRADIENTS, clipping="where the loop clips", clips_at=0, clips_by="",
            num_accumulated=gradients.num_steps, precision=str(state.mixed_precision), strategy=str(state.distributed_type),
            rank=state.process_index, world_size=state.num_processes, resumed_at=0, epoch=0,
        )  # fmt: skip
        self._emit(started)

    @contained
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        known = {name: value for name, value in values.items() if value is None or isinstance(value, (bool, int, float, str))}
        self._emit(TrackerConfigured(values=known))

    @contained
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._log(values)

    def finish(self) -> None:
        self._end()
