"""Passes over the data: each time that a DataLoader starts, and the loop of epochs around it."""

import weakref
from dataclasses import dataclass
from typing import Any

from sonde.capture.describe_dataloader import describe_loader
from sonde.capture.find_planned_epochs import enclosing_epoch_loop, lines_of_callers
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.user_source_line import describe_line, user_frame
from sonde.events import CallSiteFound, DataPass, encode
from sonde.statistics.private_torch_api import has_map_dataset

MAX_LOADERS = 200  # that are told apart
MAX_PASSES = 2000  # events: what starts a loader more often than that has no epochs
RESTARTS = 16  # passes that began one step after the other: the loader is asked for single batches, and further passes are not recorded


@dataclass(slots=True)
class _LoaderEntry:
    index: int
    loader: weakref.ref[Any]
    num_batches: int | None
    num_passes: int = 0
    last_step: int = -2
    num_consecutive: int = 0


class DataLoaderEpochProbe(Probe):
    """Records when a loader begins a pass, with the number of epochs that the user's loop plans."""

    name = "dataloader_epochs"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._entries: dict[int, _LoaderEntry] = {}
        self._num_loaders = self._num_passes = 0
        self._attached_at = lines_of_callers()

    def on_loader_start(self, loader: Any) -> None:
        entry = self._entry(loader) if self._num_passes < MAX_PASSES else None
        if entry is None:
            return
        step = self._state.number
        entry.num_consecutive = entry.num_consecutive + 1 if step == entry.last_step + 1 else 0
        entry.num_passes += 1
        entry.last_step = step
        if entry.num_consecutive >= RESTARTS:
            return
        self._num_passes += 1
        is_last = entry.num_consecutive == RESTARTS - 1 or self._num_passes == MAX_PASSES
        loop = enclosing_epoch_loop(self._attached_at)
        event = DataPass(
            loader=entry.index, pass_number=entry.num_passes, num_batches=entry.num_batches, is_last_recorded=is_last or None,
            **(loop._asdict() if loop else {}), description=_description(loader) if entry.num_passes == 1 else None,
        )  # fmt: skip
        self._recorder.emit(event, step)

    def _entry(self, loader: Any) -> _LoaderEntry | None:
        entry = self._entries.get(id(loader))
        if entry is None or entry.loader() is not loader:
            if len(self._entries) >= MAX_LOADERS:
                self._entries = {key: each for key, each in self._entries.items() if each.loader() is not None}
                if len(self._entries) >= MAX_LOADERS:
                    return None
            entry = self._entries[id(loader)] = _LoaderEntry(self._num_loaders, weakref.ref(loader), _num_batches(loader))
            self._num_loaders += 1
        return entry


def _description(loader: Any) -> dict[str, Any]:
    line, text = describe_line(user_frame())
    return dict(encode(CallSiteFound(call="loader", line=line, text=text, **describe_loader(loader)))[1])


def _num_batches(loader: Any) -> int | None:
    try:
        return len(loader) if has_map_dataset(loader) else None
    except Exception:  # a sampler without a length
        return None
