"""The verdict for programs: the report's own JSON, strict, in one schema (docs/guide/reading-a-verdict.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonde.report import Report


def render(report: Report) -> str:
    """The report as one JSON document."""
    return report.to_json()
