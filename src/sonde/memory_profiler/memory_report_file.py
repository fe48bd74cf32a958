"""A memory report as strict JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from sonde.errors import SondeError
from sonde.memory_profiler.memory_report import CATEGORIES, DeviceMemory, Kept, MemoryReport, Peak, Point, Process, Snapshot, Usage
from sonde.report import strict

FORMAT = "sonde-memory"
SCHEMA = 1


def to_dict(report: MemoryReport) -> dict[str, Any]:
    """Everything that was measured; what follows from it (totals, shares) is there too, for readers without Sonde."""
    data = {each.name: getattr(report, each.name) for each in fields(report)}
    data["devices"] = {name: _device(one) for name, one in report.devices.items()}
    data["snapshots"] = [
        {**asdict(one), "usage": {device: _usage(usage) for device, usage in one.usage.items()}} for one in report.snapshots
    ]
    data["kept"] = [asdict(one) for one in report.kept]
    data["process"] = asdict(report.process)
    document: dict[str, Any] = strict({"format": FORMAT, "schema": SCHEMA, **data, "peak_gb": report.peak_gb(), "fits": report.fits()})
    return document


def from_dict(document: Mapping[str, Any]) -> MemoryReport:
    """The report again. Raises SondeError where the document is not one."""
    if document.get("format") != FORMAT:
        raise SondeError(f'this JSON is not a memory report of Sonde: its "format" is {document.get("format")!r}, not {FORMAT!r}.')
    if not isinstance(document.get("schema"), int) or document["schema"] > SCHEMA:
        raise SondeError(
            f"this memory report is of format {document.get('schema')!r}; this version reads up to {SCHEMA}. "
            "Upgrade with: pip install -U sonde"
        )
    try:
        known = {each.name for each in fields(MemoryReport)}
        data = {name: value for name, value in document.items() if name in known}
        data["devices"] = {str(name): _device_again(one) for name, one in data["devices"].items()}
        data["snapshots"] = tuple(_snapshot_again(one) for one in data.get("snapshots", ()))
        data["kept"] = tuple(Kept(**one) for one in data.get("kept", ()))
        data["process"] = Process(**data.get("process", {}))
        data["notes"] = tuple(map(str, data.get("notes", ())))
        return MemoryReport(**data)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SondeError(f"this memory report is damaged and cannot be read: {error}.\nMeasure again to make a new one.") from error


def _usage(usage: Usage) -> dict[str, Any]:
    return {"total": usage.total, "by_place": {category: dict(places) for category, places in usage.by_place.items()}}


def _device(one: DeviceMemory) -> dict[str, Any]:
    return {
        "device": one.device,
        "peak": {**{each.name: getattr(one.peak, each.name) for each in fields(one.peak)}, "usage": _usage(one.peak.usage)},
        "now": _usage(one.now),
        "categories": list(CATEGORIES),
        "timeline": [[point.time_s, *point.values] for point in one.timeline],
        "batch_most": one.batch_most,
        "batch_rest": one.batch_rest,
        "allocated": one.allocated,
        "reserved": one.reserved,
        "outside": one.outside,
        "fragmentation": one.fragmentation,
    }


def _usage_again(data: Mapping[str, Any]) -> Usage:
    return Usage({str(c): {str(path): int(num) for path, num in places.items()} for c, places in data["by_place"].items()})


def _device_again(data: Mapping[str, Any]) -> DeviceMemory:
    peak = Peak(**{**data["peak"], "usage": _usage_again(data["peak"]["usage"])})
    timeline = tuple(Point(float(time_s), tuple(map(int, values))) for time_s, *values in data["timeline"])
    rest = {name: data[name] for name in ("batch_most", "batch_rest", "allocated", "reserved", "outside")}
    return DeviceMemory(str(data["device"]), peak, _usage_again(data["now"]), timeline, **rest)


def _snapshot_again(data: Mapping[str, Any]) -> Snapshot:
    usage = {str(device): _usage_again(one) for device, one in data["usage"].items()}
    return Snapshot(str(data["label"]), float(data["time_s"]), usage, Process(**data["process"]))
