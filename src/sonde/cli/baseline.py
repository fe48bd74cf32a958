"""`sonde baseline`: writes the envelope of healthy runs to a file, to compare other runs with it."""

from pathlib import Path

import click

from sonde.cli._run_argument import run_path
from sonde.formatting import printable


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("baseline.json"), show_default=True, help="The file.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def baseline(runs: tuple[str, ...], output: Path, force: bool) -> None:
    """Write the baseline of healthy runs: loss, gradients, times, memory.

    The bands of several runs contain all of them, for instance different seeds. The file is small and can be committed.

    \b
    Example:  sonde baseline                              (the newest run)
              sonde baseline runs/seed1 runs/seed2 -o tests/baseline.json
              sonde diagnose --against baseline.json
    """
    from sonde.comparison.baseline_file import baseline_of, to_json
    from sonde.formatting import counted
    from sonde.render.safe_write import write_new
    from sonde.report import diagnose
    from sonde.runlog.run_reader import Run

    opened = [Run(run_path(run)) for run in runs or (None,)]
    made = baseline_of(opened)
    write_new(output, to_json(made), replace=force)
    click.echo(f"{printable(output)}: the envelope of {counted(len(opened), 'run')}, {counted(made.num_steps, 'step')}")
    for run in opened:
        report = diagnose(run)
        if report.verdict == "problems":
            name = printable(run.name)
            click.echo(f"sonde: {name} has problems ({report.findings[0].rule}), so its baseline may accept the same problems.", err=True)
