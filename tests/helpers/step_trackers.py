"""A step tracker without a session, for tests that call the probes themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sonde.capture.disable_failing_probes import ErrorIsolation
from sonde.capture.run_log_recorder import StepRecorder
from sonde.capture.step_tracker import IncidentHandler, StepTracker
from sonde.capture.watched_models_registry import ModelRegistry
from sonde.config import DebugConfig
from sonde.runlog.writer import Writer


def new_tracker(
    folder: Path, config: DebugConfig | None = None, make_handlers: Callable[[], Sequence[IncidentHandler]] = tuple
) -> StepTracker:
    """It writes a run into the folder; its errors are raised."""
    recorder = StepRecorder(Writer(folder, rank=0, world_size=1, manifest={}))
    models = ModelRegistry(recorder)
    isolation = ErrorIsolation(lambda probe, where, error: None, strict=True)
    tracker = StepTracker(
        recorder, config or DebugConfig(), isolation, models, concerns=lambda optimizer: True, make_handlers=make_handlers
    )
    models.connect(tracker)
    return tracker
