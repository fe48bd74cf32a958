"""The table that `sonde switch` prints: which switches of a run are on, and which requests the run has not yet applied."""

from sonde.render.summaries.tables import text_table
from sonde.runlog.run_reader import Run
from sonde.runlog.switch_file import SWITCHES, read_switch_requests

BY_FILE = "sonde switch"  # origin of a change that was requested through the switch file


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
        wanted = requests.get(name, on)
        asked = ("on" if wanted else "off") if wanted is not on and by in ("", BY_FILE) else ""  # else it was applied, and changed since
        rows.append((name, "on" if on else "off", f"step {last.step}" if last is not None else "", by, asked))
    return text_table(("switch", "is", "since", "by", "asked for"), rows, left=5)
