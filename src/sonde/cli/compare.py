"""`sonde compare`: two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sonde.cli._run_argument import run_path
from sonde.cli._terminal import open_terminal
from sonde.errors import NoRunError, SondeError
from sonde.formatting import printable

if TYPE_CHECKING:
    from sonde.comparison.compare import RunComparison

FORMATS = (".html", ".md", ".json")


@click.command()
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document for programs.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a file: .html, .md or .json.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def compare(a: str | None, b: str | None, as_json: bool, output: Path | None, force: bool) -> None:
    """Put two runs side by side: where their numbers part, and what differs in loss, speed, findings and settings.

    A and B are run directories, or names of runs or enough of them. With one, it is compared with the run before it; with none, the
    newest is.

    \b
    Example:  sonde compare runs/base runs/new
              sonde compare new                       (with the run before it)
              sonde compare base new -o compare.html
              sonde compare base new --json | jq .headline

    Exit code 0: identical, alike, or nothing could be told. 1: something differs that is worth telling.
    """
    if output is not None and output.suffix.lower() not in FORMATS:
        raise SondeError(f"{output} ends in none of {', '.join(FORMATS)}: Sonde tells the format by it.")
    if output is not None and as_json:
        raise SondeError(f"--json prints, -o writes a file: give one of them.\nFor a JSON file: -o {output.with_suffix('.json')}")
    from sonde.comparison.compare import compare as side_by_side

    newer = run_path(b or a)
    older = run_path(a) if a and b else _before(newer)
    comparison = side_by_side(older, newer)
    if output is not None:
        from sonde.render.safe_write import write_new

        write_new(output, _content(comparison, output.suffix.lower()), replace=force)
        click.echo(printable(output))
    elif as_json:
        click.echo(_content(comparison, ".json"), nl=False)
    else:
        from sonde.render.terminal.comparison_terminal import TerminalComparison

        open_terminal().print(TerminalComparison(comparison))
    raise SystemExit(comparison.exit_code)


def _before(run: Path) -> Path:
    """The run that was started before this one, in the same directory."""
    from sonde.runlog.directory import runs_in

    beside = runs_in(run.resolve().parent)
    older = [path for place, path in enumerate(beside) if run.resolve() in beside[:place]]
    if not older:
        raise NoRunError(f"there is no run before {run}, so there is nothing to compare it with.\nName two: sonde compare A B")
    return older[0]


def _content(comparison: RunComparison, suffix: str) -> str:
    if suffix == ".html":
        from sonde.render.html.comparison_html import comparison_html

        return comparison_html(comparison)
    if suffix == ".md":
        from sonde.render.markdown import comparison_markdown

        return comparison_markdown(comparison)
    return json.dumps(comparison.to_dict(), indent=1, allow_nan=False) + "\n"
