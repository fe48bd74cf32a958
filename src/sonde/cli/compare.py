"""`sonde compare`: shows the differences of two runs."""

from pathlib import Path

import click

from sonde.cli._run_argument import run_path
from sonde.cli._terminal import check_format, open_terminal, write_output
from sonde.errors import NoRunError, SondeError


@click.command()
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a file: .html, .md or .json.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def compare(a: str | None, b: str | None, as_json: bool, output: Path | None, force: bool) -> None:
    """Show where two runs differ: numbers, loss, speed, findings, settings.

    A and B are run directories, or names of runs or parts of them. Without B, A is compared with the run before it; without both, the
    newest run is.

    \b
    Example:  sonde compare runs/base runs/new
              sonde compare new                       (with the run before it)
              sonde compare base new -o compare.html
              sonde compare base new --json | jq .headline

    Exit code 0: identical, alike, or unknown. 1: different.
    """
    suffix = check_format(output) if output is not None else ".json"
    if output is not None and as_json:
        raise SondeError(f"--json prints, -o writes a file: give one of them.\nFor a JSON file: -o {output.with_suffix('.json')}")
    from sonde.comparison.compare import compare as compare_runs
    from sonde.comparison.compare import comparison_json
    from sonde.render.html.comparison_html import comparison_html
    from sonde.render.report_markdown import comparison_markdown
    from sonde.render.terminal.comparison_terminal import TerminalComparison

    newer = run_path(b or a)
    comparison = compare_runs(run_path(a) if a and b else _run_before(newer), newer)
    if output is None and not as_json:
        open_terminal().print(TerminalComparison(comparison))
    else:
        render = {".html": comparison_html, ".md": comparison_markdown}.get(suffix, comparison_json)
        write_output(output, render(comparison), replace=force)
    raise SystemExit(comparison.exit_code)


def _run_before(run: Path) -> Path:
    """The run that was started before this one, in the same directory."""
    from sonde.runlog.run_directory import runs_in

    newest_first = runs_in(run.resolve().parent)
    older = newest_first[newest_first.index(run.resolve()) + 1 :] if run.resolve() in newest_first else []
    if not older:
        raise NoRunError(f"there is no run before {run} to compare it with.\nName two: sonde compare A B")
    return older[0]
