"""Run: reads a run from the files of all its processes, during the training or after it.

Only an index is held in memory; steps, frames, events and columns are read on request. The order follows from step numbers, ranks and
positions in the files, never from a clock.
"""

import difflib
import heapq
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from sonde.errors import NoRunError, SondeError
from sonde.events import (
    ANSWER_KINDS,
    BATCH_FIELDS,
    EVENT_TYPES,
    EXPONENT_FIELDS,
    OPTIONAL_SCALARS,
    SITE_KINDS,
    STATISTICS,
    STEP_SCALARS,
    Event,
    Frame,
    Kind,
    Site,
    Step,
    TypedEvent,
)
from sonde.formatting import listing
from sonde.runlog import record_format as f
from sonde.runlog.fatal_signal_file import FatalSignal, dump_path, read_fatal_signal
from sonde.runlog.is_writer_running import process_state
from sonde.runlog.log_file_reader import Damage, Segment
from sonde.runlog.record_format import Gap
from sonde.runlog.run_directory import LOG_SUFFIX, RUN_JSON, is_run, no_run, read_run_json

AnyEvent = TypeVar("AnyEvent", bound=TypedEvent)

MAX_NEAREST = 3  # names that a message suggests
MAX_LISTED = 12  # names that a message lists where none is near
AHEAD = 1 << 20  # bytes read at once when all records are read
_NAME = re.compile(r"(?P<stem>rank(?P<rank>[0-9]{1,9})-.*)-(?P<segment>[0-9]{3,9})\.sonde", re.DOTALL)
# The ending of a run with several processes is the first of these that one of them has.
_WORST_FIRST = ("running", "exception", "killed", "interrupted", "exit", "unknown", "finished")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run, or one of its processes, ended."""

    how: str  # finished | exception | exit | interrupted, or running | killed | unknown (written on another host)
    exit_code: int | None
    exception: str | None
    last_step: int
    signal: str = ""  # "SIGILL (illegal instruction)": of a killed run, if it was recorded


class RunProcess:
    """One process of a run: one rank, one attempt, its segments in order. Site ids are valid only within it."""

    def __init__(self, stem: str, rank: int) -> None:
        self.stem = stem
        self._rank = rank
        self._segments: dict[tuple[int, str], Segment] = {}
        self.sites: dict[int, Site] = {}

    @property
    def segments(self) -> list[Segment]:
        return [self._segments[key] for key in sorted(self._segments)]

    @property
    def is_empty(self) -> bool:
        """Whether there is not even a manifest: a file that was just created, or another file with the name of a log."""
        return not any(segment.manifest or len(segment) for segment in self.segments)

    @property
    def manifest(self) -> Mapping[str, Any]:
        return next((segment.manifest for segment in self.segments if segment.manifest), {})

    @property
    def rank(self) -> int:
        rank = self.manifest.get("rank")
        return rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else self._rank

    @property
    def attempt(self) -> int:
        """The number of processes of this rank that wrote to the directory before."""
        attempt = self.manifest.get("attempt")
        return attempt if isinstance(attempt, int) and 0 <= attempt < 1 << 31 else 0

    @property
    def last_step(self) -> int:
        return max((segment.last_step for segment in self.segments), default=-1)

    @property
    def ended(self) -> Ending:
        end = self._end
        if end is None and (fatal := self._fatal_signal) is not None:
            return Ending("killed", None, None, self.last_step, f"{fatal.signal} ({fatal.meaning})")
        if end is None:
            how = {"running": "running", "gone": "killed", "unknown": "unknown"}[process_state(self.manifest)]
            return Ending(how, None, None, self.last_step)
        code, exception = end.data.get("exit_code"), end.data.get("exception")
        return Ending(
            str(end.data.get("how", "finished")),
            code if isinstance(code, int) else None,
            exception if isinstance(exception, str) and exception else None,
            self.last_step,
        )

    @property
    def fatal_signal(self) -> Event | None:
        """The signal that killed the process, as an event of the interrupted step."""
        fatal = self._fatal_signal if self._end is None else None
        return None if fatal is None else fatal.to_event(self.last_step + 1)

    @property
    def _end(self) -> Event | None:
        return next((segment.end for segment in reversed(self.segments) if segment.end is not None), None)

    @property
    def _fatal_signal(self) -> FatalSignal | None:
        if not self._segments or process_state(self.manifest) == "running":
            return None
        return read_fatal_signal(dump_path(self.segments[0].path.parent, self.manifest))

    def refresh(self, number: int, path: Path) -> int:
        segment = self._segments.setdefault((number, path.name), Segment(path))
        num_new = segment.refresh()
        self.sites |= segment.sites
        return num_new

    def steps(self) -> Iterator[Step]:
        """Complete steps in the order of writing. Frames of an incomplete step are omitted; its events come with the next complete
        step. What a search found is an event of the step that was searched, also if it was written later."""
        frames: dict[int, dict[str, Frame]] = {}
        events: list[Event] = []
        answers = self._answers()
        rank = self.rank
        sites, names = None, list[tuple[int, str]]()
        for segment in self.segments:
            for _, fact in segment.contents(range(len(segment)), ahead=AHEAD):
                if isinstance(fact, Event):
                    if fact.kind not in ANSWER_KINDS:
                        events.append(fact)
                elif fact.kind != Kind.STEP:
                    frames.setdefault(fact.step, {})[fact.kind] = fact
                else:
                    number = fact.step
                    if fact.sites is not sites:  # shared by the frames of one plan
                        sites, names = fact.sites, self._scalar_names(fact)
                    values = fact.values[0].tolist() if fact.fields else []
                    scalars = {name: values[column] for column, name in names} if values else {}
                    if answers and answers[0].step <= number:
                        events += [answer for answer in answers if answer.step <= number]
                        answers = [answer for answer in answers if answer.step > number]
                    now = tuple(event for event in events if event.step <= number)
                    yield Step(number, rank, scalars, frames.get(number, {}), now, self.sites)
                    events = [event for event in events if event.step > number]
                    frames = {step: later for step, later in frames.items() if step > number}

    def _answers(self) -> list[Event]:
        found = [event for kind in sorted(ANSWER_KINDS) for event in self.events(kind)]
        return sorted(found, key=lambda event: event.step)

    def _scalar_names(self, frame: Frame) -> list[tuple[int, str]]:
        ids = frame.sites.tolist()
        return [(column, self.sites[site].path) for column, site in enumerate(ids) if site in self.sites]

    def frames(self, kind: str) -> Iterator[Frame]:
        """Frames of one kind in the order of writing."""
        return (fact for fact in self._contents(f.FRAME, [kind]) if isinstance(fact, Frame))

    def events(self, *kinds: str) -> Iterator[Event]:
        """Events of these kinds, or all events, in the order of writing."""
        return (fact for fact in self._contents(f.EVENT, kinds) if isinstance(fact, Event))

    def _contents(self, type_: int, kinds: Sequence[str]) -> Iterator[Frame | Event]:
        for segment in self.segments:
            entries = sorted(entry for kind in kinds or segment.kinds(type_) for entry in segment.entries(type_, kind))
            for _, fact in segment.contents(entries):
                yield fact


class Run:
    """A run directory, or a single `.sonde` file. `refresh()` reads records that were added."""

    def __init__(self, path: Path | str) -> None:
        given: object = path
        if not isinstance(given, (str, os.PathLike)):
            is_unstarted = " A session has no run before its start()." if given is None else ""
            raise NoRunError(
                f"a run is read from a path, not from {type(given).__name__}.{is_unstarted}\n"
                'Pass the directory of the run, as in sonde.Run("runs/base"); "sonde runs" lists all runs.'
            )
        self.path = Path(path)
        self.info: dict[str, Any] = {}  # run.json
        self._processes: dict[str, RunProcess] = {}
        self._info_damage: list[Damage] = []
        self._is_directory = self.path.is_dir()
        if self._is_directory:
            if not is_run(self.path):
                raise no_run(self.path)
        elif not self.path.exists():
            raise no_run(self.path)
        elif not self.path.is_file():
            raise NoRunError(f"{self.path} is neither a directory nor a file, so it cannot be a run.")
        else:
            self.path = self.path.resolve()  # links in the user's path are followed; links inside of a run are not
        self.refresh()
        if not self._is_directory and not self.processes and not self.path.name.endswith(LOG_SUFFIX):
            raise NoRunError(f"{self.path} is not a run: name its directory, or a file that ends in {LOG_SUFFIX}.")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def refresh(self) -> int:
        """Read records that were added. Returns the number of new frames and events."""
        if not self._is_directory:
            return self._refresh_file(self.path)
        if not self.info:
            self._read_info()
        try:
            names = sorted(name for name in os.listdir(self.path) if name.endswith(LOG_SUFFIX))
        except OSError:
            return 0  # the directory was deleted; the index stays
        return sum(self._refresh_file(self.path / name) for name in names)

    def _read_info(self) -> None:
        try:
            self.info, self._info_damage = read_run_json(self.path), []
        except ValueError as error:
            self._info_damage = [Damage(self.path / RUN_JSON, 0, 0, str(error))]

    def _refresh_file(self, path: Path) -> int:
        match = _NAME.fullmatch(path.name)
        stem, rank, number = (match["stem"], int(match["rank"]), int(match["segment"])) if match else (path.name, 0, 0)
        if stem not in self._processes:
            self._processes[stem] = RunProcess(stem, rank)
        return self._processes[stem].refresh(number, path)

    # ---- processes and endings

    @property
    def processes(self) -> list[RunProcess]:
        """By attempt, then by rank."""
        written = [process for process in self._processes.values() if not process.is_empty]
        return sorted(written, key=lambda process: (process.attempt, process.rank, process.stem))

    @property
    def ranks(self) -> list[int]:
        return sorted({process.rank for process in self.processes})

    @property
    def manifests(self) -> list[Mapping[str, Any]]:
        return [process.manifest for process in self.processes]

    @property
    def sites(self) -> Mapping[int, Site]:
        """The sites of the newest process of the lowest rank. Each `Step` has its own."""
        processes = self._of_rank(None)
        return processes[-1].sites if processes else {}

    @property
    def last_step(self) -> int:
        """The highest complete step; -1 without any."""
        return max((process.last_step for process in self._processes.values()), default=-1)

    @property
    def ended(self) -> Ending:
        newest = {process.rank: process for process in self.processes}
        endings = [process.ended for process in newest.values()]
        if not endings:
            return Ending("unknown", None, None, -1)
        order = {how: index for index, how in enumerate(_WORST_FIRST)}
        worst = min(endings, key=lambda ending: (order.get(ending.how, len(order)), not ending.signal))
        return replace(worst, last_step=self.last_step)

    @property
    def log_sizes(self) -> dict[str, int]:
        """The bytes of each log when it was read, by file name."""
        return {segment.path.name: segment.size for segment in self._segments()}

    @property
    def damage(self) -> list[Damage]:
        """Bytes that could not be read."""
        return self._info_damage + [note for segment in self._segments() for note in segment.damage]

    @property
    def torn(self) -> list[Damage]:
        """Incomplete records at the end of a file: still being written, or cut off by the death of the process."""
        return [segment.torn for segment in self._segments() if segment.torn is not None]

    @property
    def gaps(self) -> list[Gap]:
        """Records that the training could not write."""
        return [gap for segment in self._segments() for gap in segment.gaps]

    @property
    def num_unknown(self) -> int:
        """Number of records of a type that this version does not know."""
        return sum(segment.num_unknown for segment in self._segments())

    @property
    def num_unreadable_events(self) -> int:
        """Number of events with a value of the wrong type. `events()` returns them as stored; `events(NonFinite)` omits them."""
        return sum(segment.num_unreadable_events for segment in self._segments())

    def _segments(self) -> Iterator[Segment]:
        for process in self._processes.values():
            yield from process.segments

    # ---- contents

    def steps(self, rank: int | None = None) -> Iterator[Step]:
        """All complete steps, ordered by attempt, step number, rank and position in the file. A rank that the run does not have raises
        SondeError."""
        self._check_rank(rank)
        return self._ordered_steps(rank)

    def _ordered_steps(self, rank: int | None) -> Iterator[Step]:
        attempts: dict[int, list[RunProcess]] = {}
        for process in self.processes:
            if rank is None or process.rank == rank:
                attempts.setdefault(process.attempt, []).append(process)
        for attempt in sorted(attempts):
            streams = [process.steps() for process in attempts[attempt]]
            yield from heapq.merge(*streams, key=lambda step: (step.number, step.rank))

    @overload
    def events(self, kind: str | None = None, rank: int | None = None) -> Iterator[Event]: ...

    @overload
    def events(self, kind: type[AnyEvent], rank: int | None = None) -> Iterator[AnyEvent]: ...

    def events(self, kind: str | type[AnyEvent] | None = None, rank: int | None = None) -> Iterator[Event] | Iterator[AnyEvent]:
        """Events by attempt, then by rank, in the order in which they were written.

        Args:
            kind: The kind in the log (`"nonfinite"`) gives `Event`; a class of `sonde.events` (`NonFinite`) gives objects of that class;
                None gives all events as `Event`.
            rank: Only the processes of this rank.

        A kind that neither Sonde nor this run knows, or a rank that the run does not have, raises SondeError.
        """
        if not (kind is None or isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, TypedEvent))):
            raise SondeError(f"events are selected by kind ('nonfinite') or by a class of sonde.events (NonFinite), not by {kind!r}.")
        self._check_rank(rank)
        if isinstance(kind, str):
            self._check_event_kind(kind)
        return self._stored_events(kind, rank) if kind is None or isinstance(kind, str) else self._typed_events(kind, rank)

    def _stored_events(self, kind: str | None, rank: int | None) -> Iterator[Event]:
        for process in self.processes:
            if rank is None or process.rank == rank:
                yield from process.events(*([] if kind is None else [kind]))

    def _typed_events(self, event_type: type[AnyEvent], rank: int | None) -> Iterator[AnyEvent]:
        for event in self._stored_events(event_type.KIND, rank):
            if isinstance(typed := event.typed, event_type):
                yield typed

    def frames(self, kind: str, rank: int | None = None) -> Iterator[Frame]:
        """Frames of one kind in the order of writing; of the lowest rank by default. A kind or a rank that the run does not know raises
        SondeError."""
        self._check_rank(rank)
        self._check_kind(kind)
        return (frame for process in self._of_rank(rank) for frame in process.frames(kind))

    @property
    def kinds(self) -> list[str]:
        """The kinds of its frames."""
        return sorted({kind for segment in self._segments() for kind in segment.kinds(f.FRAME)})

    @property
    def logged(self) -> list[str]:
        """The names of the numbers passed to `session.log`."""
        names: dict[str, None] = {}
        for process in self._of_rank(None):  # the ids of sites differ between attempts
            known = {site for frame in process.frames(Kind.LOG) for site in frame.sites.tolist()}
            names |= dict.fromkeys(process.sites[site].path for site in sorted(known) if site in process.sites)
        return list(names)

    def series(
        self, kind: str, path: str, field: str, rank: int | None = None, *, model: str | None = None, call: int = 0, item: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Steps and values of one number, as written: `run.series("gradient", "fc1.weight", "l2")`. Empty if it was not measured in any
        step; a `SondeError` with the nearest names if this run has no such kind, layer, field, model or rank."""
        found = self._column(kind, path, field, rank, model=model, call=call, item=item)
        if not len(found[0]):
            self._check_rank(rank)
            self._check_kind(kind)
            self._check_path(kind, path, model)
            self._check_field(kind, field)
        return found

    def scalar(self, name: str, rank: int | None = None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Steps and values of one scalar: recorded by Sonde (`run.scalar("loss")`), or else logged by the user under that name. Empty if
        no step has it; a `SondeError` with the nearest names if this run knows no such scalar."""
        for kind in (Kind.STEP, Kind.LOG):
            found = self._column(kind, name, "value", rank)
            if len(found[0]):
                return found
        self._check_rank(rank)
        self._check_path(Kind.STEP, name, None)
        return found

    def _column(
        self, kind: str, path: str, field: str, rank: int | None, *, model: str | None = None, call: int = 0, item: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        steps, values = [np.empty(0, np.int64)], [np.empty(0, np.float64)]
        for process in self._of_rank(rank):
            wanted = [
                site.id
                for site in process.sites.values()
                if site.path == path and (site.call, site.item) == (call, item) and model in (None, site.model)
            ]
            for segment in process.segments if wanted else []:
                some_steps, some_values = segment.column(kind, field, wanted)
                steps.append(some_steps)
                values.append(some_values)
        return np.concatenate(steps), np.concatenate(values)

    # ---- names that cannot be meant

    def _check_rank(self, rank: int | None) -> None:
        if rank is not None and self.ranks and rank not in self.ranks:
            raise SondeError(f"{self.name} has no rank {rank!r}; it has {listing([str(each) for each in self.ranks], MAX_LISTED)}.")

    def _check_kind(self, kind: str) -> None:
        known = dict.fromkeys([*SITE_KINDS, *self.kinds])
        if kind not in known and not str(kind).endswith(Kind.EXPONENTS):
            raise SondeError(f"{kind!r} is no kind of measurement. {_nearest(kind, known)}")

    def _check_event_kind(self, kind: str) -> None:
        known = [event_type.KIND for event_type in EVENT_TYPES]
        if kind not in known:
            own = {each for segment in self._segments() for each in segment.kinds(f.EVENT)}
            if kind not in own:
                raise SondeError(f"{kind!r} is no kind of event. {_nearest(kind, [*known, *sorted(own)])}")

    def _check_path(self, kind: str, path: str, model: str | None) -> None:
        sites = [site for process in self.processes for site in process.sites.values()]
        models = dict.fromkeys(site.model for site in sites if site.kind != "scalar")
        if model is not None and model not in models:
            raise SondeError(f"{self.name} has no model {model!r}. {_nearest(model, [each or repr(each) for each in models])}")
        site_kind = SITE_KINDS.get(str(kind).removesuffix(Kind.EXPONENTS))
        known = dict.fromkeys(site.path for site in sites if site_kind in (None, site.kind))
        if site_kind == "scalar":
            known |= dict.fromkeys([*STEP_SCALARS, *OPTIONAL_SCALARS])
        if site_kind == "output" and self._has_unmeasured_module(path, sites):
            return
        if known and path not in known:  # without any, nothing was measured yet
            raise SondeError(f"{self.name} has no {site_kind or 'site'} {path!r}. {_nearest(path, known)}")

    def _has_unmeasured_module(self, path: str, sites: Iterable[Site]) -> bool:
        """Whether this is a module without a site, because its outputs could not be measured or have not been yet."""
        if any(f"{site.path}.".startswith(f"{path}.") for site in sites if site.kind == "parameter"):
            return True
        return any(f"{path}.".startswith(f"{event.data.get('where')}.") for event in self.events("unobserved"))

    def _check_field(self, kind: str, field: str) -> None:
        frame = next((frame for rank in self.ranks for frame in self.frames(kind, rank)), None)
        known = frame.fields if frame is not None else _fields(kind)
        if field not in known:
            raise SondeError(f"{kind!r} measures no {field!r}. {_nearest(field, known)}")

    def _of_rank(self, rank: int | None) -> list[RunProcess]:
        if rank is None:
            rank = next(iter(self.ranks), 0)
        return [process for process in self.processes if process.rank == rank]


def _fields(kind: str) -> tuple[str, ...]:
    """What a kind measures, where no frame of it shows that."""
    if kind in (Kind.STEP, Kind.LOG):
        return ("value",)
    return EXPONENT_FIELDS if kind.endswith(Kind.EXPONENTS) else BATCH_FIELDS if kind == Kind.BATCH else STATISTICS


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known names that are most like this one: they contain it, or differ in few letters."""
    text, names = str(name), list(dict.fromkeys(known))
    inside = [each for each in names if text and text.lower() in each.lower()]
    near = list(dict.fromkeys([*difflib.get_close_matches(text, names, n=MAX_NEAREST), *inside]))[:MAX_NEAREST]
    return f"Nearest: {', '.join(near)}" if near else f"There are: {listing(names, MAX_LISTED)}"
