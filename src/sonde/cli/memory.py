"""`sonde memory`: estimates the memory of a training script without training."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sonde.cli._script_argument import check_script, script_command
from sonde.errors import SondeError, Stopped

if TYPE_CHECKING:
    from sonde.memory_profiler.memory_report import MemoryReport

ENDED_FROM_OUTSIDE = (-9, -15)  # SIGKILL and SIGTERM: the script is not started again after them
STDERR = 2  # for the output of the script: stdout is for the result


@script_command
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Also estimate a batch of N.")
@click.option("--real", is_flag=True, help="Run the first two steps with real tensors instead of fake ones.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def memory(module: bool, batch_size: int | None, real: bool, as_json: bool, script: str, args: tuple[str, ...]) -> None:
    """Show how much memory a training script needs, and for what.

    The script runs up to its second optimizer step with fake tensors, which have shapes but no data. If it needs data (numpy arrays, sizes
    that depend on values), its first two steps run with real tensors, and a note says so. The output of the script goes to stderr.

    \b
    Example:  sonde memory train.py --model large
              sonde memory --batch-size 256 train.py

    Exit code 0: it fits into this machine, or that is unknown. 1: it does not fit. 2: not measured, or wrong usage.
    """
    check_script("memory", script, module=module)
    answer = _measure("real" if real else "fake", script, args, module=module)
    note = ""
    if not real and "failed" in answer and not answer.get("final"):
        note = f"fake tensors could not be used ({answer['failed']}), so the first two steps were run with real tensors"
        answer = _measure("real", script, args, module=module)
    if "failed" in answer:
        raise SondeError(f"{script} did not reach its second optimizer step:\n{answer['failed']}")
    from sonde.memory_profiler import from_dict

    report = from_dict({**answer, "notes": [*answer["notes"], *([note] if note else [])]})
    _print(report, batch_size, as_json)
    raise SystemExit(1 if report.fits() is False else 0)


def _measure(how: str, script: str, args: tuple[str, ...], *, module: bool) -> dict[str, Any]:
    """Run the script up to its second optimizer step in its own process: one that takes too much memory is killed."""
    with tempfile.TemporaryDirectory(prefix="sonde-") as folder:
        output = Path(folder) / "report.json"
        kind = "module" if module else "file"
        command = [sys.executable, "-m", "sonde.memory_profiler.dry_run", str(output), how, kind, script, *args]
        try:
            done = subprocess.run(command, stdout=STDERR, check=False)
        except KeyboardInterrupt:
            raise Stopped(f"stopped by you before the second optimizer step of {script}; nothing was measured.") from None
        try:
            answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            by = f"it was killed by signal {-done.returncode}" if done.returncode < 0 else f"it ended with exit code {done.returncode}"
            hint = " (the system does that when memory runs out)" if done.returncode == -9 else ""
            return {"failed": f"{by}{hint}", "final": done.returncode in ENDED_FROM_OUTSIDE}
    return answer


def _print(report: MemoryReport, batch_size: int | None, as_json: bool) -> None:
    forecast = report.forecast(batch_size) if batch_size is not None else None
    if as_json:
        document = report.to_dict()
        if forecast is not None:
            document["forecast"] = {"batch_size": forecast.size, "peak_bytes": forecast.peak_bytes, "how": forecast.how}
        click.echo(json.dumps(document, indent=1, allow_nan=False))
        return
    click.echo(report.summary())
    if forecast is not None:
        from sonde.render.summaries.memory_summary import wrapped

        click.echo(wrapped(f"forecast    {forecast}"))
