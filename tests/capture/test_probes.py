"""The tuple of probes is the folder of probes."""

from __future__ import annotations

from pathlib import Path

from sonde.capture import probes


def test_every_probe_in_the_folder_is_listed_and_named_after_its_file() -> None:
    folder = Path(probes.__file__).parent
    files = sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "probe"))
    assert sorted(probe.__module__.rpartition(".")[2] for probe in probes.PROBES) == files
    assert sorted(probe.name for probe in probes.PROBES) == files
