"""Which switches of a run are on, as its last events say, and what was asked for from outside and has not been heard of yet."""

from __future__ import annotations

from sonde.runlog.reader import Run
from sonde.runlog.switch_file import SWITCHES, read_switch_requests
from sonde.views.table import text_table

HEARD = "sonde switch"  # who turned it, where it was the file


def switch_table(run: Run) -> str:
    flips = {str(event.data.get("switch")): event for event in run.events("switch")}
    try:
        requests = read_switch_requests(run.path) if run.ended.how in ("running", "unknown") else {}
    except ValueError:
        requests = {}
    rows = []
    for name in SWITCHES:
        last = flips.get(name)
        on = last is not None and last.data.get("on") is True
        by = str(last.data.get("by", "")) if last is not None else ""
        wish = requests.get(name, on)
        asked = ("on" if wish else "off") if wish is not on and by in ("", HEARD) else ""  # else it was heard, and overruled
        rows.append((name, "on" if on else "off", f"step {last.step}" if last is not None else "", by, asked))
    return text_table(("switch", "is", "since", "by", "asked for"), rows, left=5)
