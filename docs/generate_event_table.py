"""Writes the table of event kinds in docs/run-format.md from the dataclasses in `sonde.events`.

    python docs/generate_event_table.py

tests/unit/test_events.py fails when the page and the dataclasses differ.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from sonde.events import EVENT_TYPES, EventField, TypedEvent, event_fields

PAGE = Path(__file__).parent / "run-format.md"
START, END = "<!-- start of the generated event table -->", "<!-- end of the generated event table -->"


def event_table() -> str:
    """The table as Markdown, one row per event kind."""
    rows = [_row(event_type) for event_type in EVENT_TYPES]
    return "\n".join(["| kind | class | when | data |", "|---|---|---|---|", *rows])


def with_event_table(page: str) -> str:
    """The text of the page with the current table between the two markers."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{event_table()}\n{END}{after}"


def _row(event_type: type[TypedEvent]) -> str:
    when = " ".join((inspect.getdoc(event_type) or "").split())
    data = "<br>".join(map(_describe, event_fields(event_type)))
    return f"| `{event_type.KIND}` | `{event_type.__name__}` | {when} | {data} |"


def _describe(field: EventField) -> str:
    type_name = f"{field.type_name.removesuffix(' or null')}, optional" if field.is_omitted_when_none else field.type_name
    python_name = f", in Python `{field.name}`" if field.name != field.key else ""
    return f"`{field.key}` ({type_name}{python_name}): {field.doc}"


if __name__ == "__main__":
    PAGE.write_text(with_event_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
