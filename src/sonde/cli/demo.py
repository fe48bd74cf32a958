"""`sonde demo`: five small trainings, four of them with a real fault."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from sonde.cli._terminal import open_terminal
from sonde.errors import SondeError


@dataclass(frozen=True, slots=True)
class Program:
    """A training script of the demo and the expected verdict."""

    file: str
    rule: str  # the root cause; empty for a healthy training
    story: str


FOLDER = Path(__file__).parent / "demo_programs"
PROGRAMS = (
    Program("forgotten_zero_grad.py", "missing-zero-grad", "A CNN learns shapes. One line is missing."),
    Program("missed_encoder.py", "params-not-in-optimizer", "An encoder and a head; accuracy gets stuck halfway."),
    Program("two_bad_rows.py", "nonfinite-origin", "The loss becomes NaN. Which operation made it, and from which samples?"),
    Program("diverging_lr.py", "lr-divergence", "A regression ends in NaN."),
    Program("healthy_cnn.py", "", "The CNN again, without the fault. It should be healthy."),
)


@click.command()
@click.option("--to", metavar="DIR", help="Where the runs and the report go.  [default: runs/]")
def demo(to: str | None) -> None:
    """Diagnose five small trainings, four of them with a fault.

    It takes about a minute and downloads nothing. The programs are ordinary training scripts.

    \b
    Example:  sonde demo
              sonde demo --to /tmp/demo

    Exit code 0: every verdict is right.
    """
    if importlib.util.find_spec("torch") is None:
        raise SondeError("the demo trains models, and torch is not installed here: pip install torch")
    from sonde.config import load_config
    from sonde.render.html.report_html import report_html
    from sonde.render.safe_write import write_new
    from sonde.render.terminal.print_to_terminal import line
    from sonde.render.terminal.report_terminal import TerminalReport
    from sonde.report import diagnose
    from sonde.runlog.run_directory import new_run_directory
    from sonde.runlog.run_reader import Run

    parent = Path(load_config(output_dir=to).output_dir)
    terminal = open_terminal()
    reports, num_right = [], 0
    for number, program in enumerate(PROGRAMS, 1):
        path = new_run_directory(parent, f"demo-{Path(program.file).stem}")
        terminal.print(line((f"{number} of {len(PROGRAMS)}  ", "bold cyan"), (program.story, "bold")))
        terminal.print(line((f"$ sonde run {program.file}", "cyan")))
        for row in _train(program.file, path):
            terminal.print(line((f"  {row}", "dim")))
        recorded = Run(path)
        report = diagnose(recorded)
        terminal.print(TerminalReport(report))
        terminal.print()
        reports.append((report, recorded))
        num_right += report.findings[0].rule == program.rule if report.findings else not program.rule and report.verdict == "healthy"
    page = parent / f"{path.name.split('_demo')[0]}_demo.html"
    write_new(page, report_html(reports))
    right = num_right == len(PROGRAMS)
    terminal.print(line((f"{num_right} of {len(PROGRAMS)} verdicts are right.", "bold green" if right else "bold red")))
    terminal.print(line("All reports on one page: ", (str(page), "bold")))
    raise SystemExit(0 if right else 1)


def _train(file: str, path: Path) -> Sequence[str]:
    """Run one program under `sonde run` in its own process. Returns what it printed."""
    command = [sys.executable, "-m", "sonde", "run", "--quiet", "--to", str(path.absolute()), file]
    utf8 = os.environ | {"PYTHONUTF8": "1"}
    with tempfile.TemporaryDirectory(prefix="sonde-demo-") as folder:  # a script of a user is outside of the package
        for program in FOLDER.glob("*.py"):
            shutil.copy(program, folder)
        child = subprocess.run(command, cwd=folder, env=utf8, capture_output=True, encoding="utf-8", errors="replace")
    if child.returncode:
        raise SondeError(f"{file} ended with code {child.returncode}.\n{child.stderr.strip()}")
    return child.stdout.splitlines()
