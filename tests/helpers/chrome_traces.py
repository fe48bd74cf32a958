"""What a Chrome trace must be so that viewers show all of it, checked event by event."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

REQUIRED = {"X": {"name", "pid", "tid", "ts", "dur"}, "i": {"name", "pid", "tid", "ts", "s"}, "C": {"name", "pid", "ts", "args"}}
NAMES = ("process_name", "process_sort_index", "process_labels", "thread_name", "thread_sort_index")


def _strict(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def events_of(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content, parse_constant=_strict)
    return valid(document)


def valid(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, if all of it holds."""
    events = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms"
    processes = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads), "viewers know threads by their number alone"
    for event in events:
        assert isinstance(event["name"], str)
        assert event["pid"] in processes
        if event["ph"] == "M":
            assert event["name"] in NAMES
            continue
        assert event.keys() >= REQUIRED[event["ph"]], event
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in threads
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in event["args"].values())
    for track in threads:
        _nested([event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == track])
    return events


def _nested(spans: list[dict[str, Any]]) -> None:
    """Perfetto drops spans that cross. Whole nanoseconds, as it counts them."""
    open_ends: list[int] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start, end = round(span["ts"] * 1e3), round(span["ts"] * 1e3) + round(span["dur"] * 1e3)
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], span
        open_ends.append(end)


def spans(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]
