"""A closed run as Parquet files beside its log: what `sonde compact` does, under the name that other formats have."""

from pathlib import Path

from sonde.errors import SondeError
from sonde.runlog.parquet import compact
from sonde.runlog.reader import Run


def export(run: Run, output: Path | None, *, replace: bool) -> list[Path]:
    """All files or none. They lie beside the log, where readers of runs look for them."""
    if output is not None:
        raise SondeError(f"Parquet files are written beside the log, not to {output}. Leave -o out, and copy them from there.")
    return compact(run.path)
