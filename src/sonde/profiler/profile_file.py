"""A profile on disk: one strict JSON document, in which numbers that are not finite are the strings "NaN", "Infinity", "-Infinity"."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.profiler.profile_report import LayerCost, ProfileReport, Section, Span, Spread
from sonde.report import strict
from sonde.views.file import write_new

if TYPE_CHECKING:
    from sonde.profiler.profile_comparison import ProfileComparison

TRACES = (".json.gz", ".trace.json")  # for Perfetto
FORMATS = (".json", ".html", *TRACES)
FORMAT = "sonde-profile"
SCHEMA = 1


def to_dict(report: ProfileReport) -> dict[str, Any]:
    """Everything that is measured, as strict JSON; what follows from it (rates, shares) is there too, for readers without Sonde."""
    data = {each.name: getattr(report, each.name) for each in fields(report)}
    data["layers"] = [_plain(layer) for layer in report.layers]
    data["sections"] = [_plain(section) for section in report.sections]
    data["derived"] = {
        "samples_per_s": report.samples_per_s, "tokens_per_s": report.tokens_per_s, "flops_per_s": report.flops_per_s, "mfu": report.mfu,
    }  # fmt: skip
    document: dict[str, Any] = strict({"format": FORMAT, "schema": SCHEMA, **data})
    return document


def from_dict(document: Mapping[str, Any]) -> ProfileReport:
    """The profile again. Raises SondeError where the document is not one."""
    if document.get("format") != FORMAT:
        raise SondeError(f'this JSON is not a profile of Sonde: its "format" is {document.get("format")!r}, not {FORMAT!r}.')
    if not isinstance(document.get("schema"), int) or document["schema"] > SCHEMA:
        raise SondeError(
            f"this profile is of format {document.get('schema')!r}; this version reads up to {SCHEMA}. Upgrade with: pip install -U sonde"
        )
    try:
        known = {each.name for each in fields(ProfileReport)}
        data = {name: value for name, value in document.items() if name in known}
        data["layers"] = tuple(LayerCost(**_typed(one, _LAYER)) for one in data.get("layers", ()))
        data["sections"] = tuple(Section(**_typed(one, _SECTION)) for one in data.get("sections", ()))
        data["spans"] = tuple(Span(int(s), str(k), str(n), float(at), float(ms), int(t)) for s, k, n, at, ms, t in data.get("spans", ()))
        return ProfileReport(**_typed(data, _REPORT))
    except (TypeError, ValueError, AttributeError) as error:
        raise SondeError(f"this profile is damaged and cannot be read: {error}.\nProfile again to make a new one.") from error


def save(report: ProfileReport, path: str | Path, *, replace: bool = False, comparison: ProfileComparison | None = None) -> Path:
    """In the format that the name ends in; a page shows a comparison too, where there is one."""
    where = Path(path)
    write_new(where, _content(report, where, comparison), replace=replace)
    return where


def refuse_format(path: Path) -> None:
    if not path.name.lower().endswith(FORMATS):
        raise SondeError(f"{path} ends in none of {', '.join(FORMATS)}: Sonde tells the format by it.")


def _content(report: ProfileReport, where: Path, comparison: ProfileComparison | None) -> str | bytes:
    refuse_format(where)
    name = where.name.lower()
    if name.endswith(TRACES):
        from sonde.export.profile_trace import trace_of_profile
        from sonde.export.trace import compressed

        return compressed(trace_of_profile(report), where)
    if name.endswith(".html"):
        from sonde.views.flame import page

        return page(report, comparison)
    return json.dumps(to_dict(report), indent=1, allow_nan=False, ensure_ascii=True) + "\n"


def load(path: str | Path) -> ProfileReport:
    where = Path(path)
    try:
        document = json.loads(where.read_text(encoding="utf-8"))
    except OSError as error:
        raise SondeError(
            f"no profile can be read from {where}: {error.strerror or error}.\nMake one with: sonde profile script.py -o {where.name}"
        ) from None
    except ValueError as error:
        raise SondeError(f"{where} is not JSON, so it is no profile of Sonde: {error}.") from None
    if not isinstance(document, dict):
        raise SondeError(f"{where} is not a profile of Sonde: it holds no JSON object.")
    return from_dict(document)


# -- both ways ------------------------------------------------------------------------------------


def _plain(value: LayerCost | Section) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _spread(value: Any) -> Spread:
    median, low, high, num = value
    return Spread(float(median), float(low), float(high), int(num))


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


def _scalars(value: Any) -> dict[str, float | str]:
    # "NaN" is a number that JSON has no word for.
    return {str(key): float(one) if one in ("NaN", "Infinity", "-Infinity") else one for key, one in value.items()}


Readers = Mapping[str, Callable[[Any], Any]]
_LAYER: Readers = {
    "path": str, "kind": str, "depth": int, "calls": float, "forward": _spread, "backward": _spread, "forward_self": _spread,
    "backward_self": _spread, "memory_bytes": int, "memory_self_bytes": int, "parameter_bytes": int, "flops_forward": int,
    "flops_backward": int, "flops_self": int, "source": str,
}  # fmt: skip
_SECTION: Readers = {"name": str, "calls": int, "total_ms": float, "spread": _spread, "parent": str}
_REPORT: Readers = {
    "title": str, "layers": tuple, "sections": tuple, "step": _spread, "spans": tuple, "num_samples": _optional, "num_tokens": _optional,
    "phases": lambda value: {str(name): _spread(one) for name, one in value.items()},
    "remainder": lambda value: {str(name): float(one) for name, one in value.items()},
    "flops_per_step": int, "peak_flops_per_s": float, "utilisation": _scalars, "batch": str, "own_cost": float,
    "environment": lambda value: {str(name): str(one) for name, one in value.items()},
    "notes": lambda value: tuple(str(one) for one in value),
}  # fmt: skip


def _typed(data: Mapping[str, Any], readers: Readers) -> dict[str, Any]:
    return {name: readers[name](value) for name, value in data.items() if name in readers}
