"""`sonde tune`: measures which changes make a training faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sonde.cli._script_argument import check_script, check_script_file, script_command
from sonde.cli._terminal import open_terminal
from sonde.formatting import printable, strict_json

if TYPE_CHECKING:
    from sonde.tuning.tuning_result import Tuning


@script_command
@click.option("--only", metavar="NAMES", default="", help="Try only these, as in workers,optimizer. --dry-run lists them.")
@click.option("--steps", type=click.IntRange(min=5), metavar="N", help="Steps per trial.  [default: those of three seconds]")
@click.option("--repeats", type=click.IntRange(1, 20), default=3, show_default=True, metavar="N", help="Runs of each promising change.")
@click.option("--time-limit", type=click.FloatRange(min=1), default=600, show_default=True, metavar="SECONDS", help="For all trials.")
@click.option("--dry-run", is_flag=True, help="List what would be tried, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def tune(
    module: bool,
    only: str,
    steps: int | None,
    repeats: int,
    time_limit: float,
    dry_run: bool,
    as_json: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Measure which changes make a training script faster.

    Each change (workers, fused optimizer, threads, channels_last, bfloat16, compile …) is tried on the first steps of the script, in
    its own process, and compared with the unchanged script, including the losses. No file is changed. The script is started a dozen times
    or more and stopped after those steps: files that it writes in its first steps are written each time.

    \b
    Example:  sonde tune train.py
              sonde tune --only workers,optimizer train.py --data small
              sonde tune --dry-run train.py

    Exit code 0: measured, with or without a gain. 2: not measured, or wrong usage.
    """
    from sonde.tuning.proposals import FAMILIES, chosen_families

    families = chosen_families([name.strip() for name in only.split(",") if name.strip()])
    if dry_run:
        if not module:
            check_script_file("tune", script)
        from sonde.render.terminal.tuning_terminal import TuningPlan

        open_terminal().print(TuningPlan(script, {name: FAMILIES[name].__doc__ or "" for name in families}, time_limit))
        return
    check_script("tune", script, module=module)
    tuning = _with_progress(script, args, module=module, only=families, steps=steps or 0, repeats=repeats, time_limit_s=time_limit)
    if as_json:
        click.echo(strict_json(tuning.to_dict()))
    else:
        from sonde.render.terminal.tuning_terminal import TerminalTuning

        open_terminal().print(TerminalTuning(tuning))
    raise SystemExit(130 if tuning.stopped == "interrupted" else 0)


def _with_progress(
    script: str, args: tuple[str, ...], *, module: bool, only: tuple[str, ...], steps: int, repeats: int, time_limit_s: float
) -> Tuning:
    """Measure with a progress bar on stderr, if that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from sonde.tuning.tune import tune as measure

    terminal = open_terminal(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[steps]}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("starting", steps="", total=None)

        def show(what: str, trial: int, num_trials: int, step: int, num_steps: int) -> None:
            share = step / num_steps if num_steps else 0.0
            known = num_trials > 1  # the number is known after the first trial
            bar.update(
                task,
                description=printable(f"trial {trial} of about {num_trials}: {what}" if known else f"trial {trial}: {what}"),
                steps=f"step {step} of {num_steps}" if num_steps else f"step {step}",
                completed=trial - 1 + min(share, 1.0),
                total=num_trials if known else None,
            )

        return measure(
            script, args, module=module, only=only, steps=steps, repeats=repeats, time_limit_s=time_limit_s, progress=show
        )  # fmt: skip
