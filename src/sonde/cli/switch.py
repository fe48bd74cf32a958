"""`sonde switch`: turns the switches of a running training on and off."""

import click

from sonde.cli._run_argument import run_path


# A name after a minus sign is not an option: "-lr_scheduling" would be read as -l -r … -h.
@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN] [+SWITCH | -SWITCH]...")
def switch(words: tuple[str, ...]) -> None:
    """Turn switches of a running training on (+) and off (-), or list them.

    The training reads the switches between two steps, about twice a second, and prints their output to its log. +all and -all mean all.

    \b
    Example:  sonde switch                 (lists the switches of the newest run)
              sonde switch +gradient_norms -memory_usage
              sonde switch runs/base +autograd_profiler
    """
    from sonde.errors import SondeError
    from sonde.formatting import printable
    from sonde.render.terminal.switch_table import switch_table
    from sonde.runlog.run_reader import Run
    from sonde.runlog.switch_file import parse_switch_words, write_switch_requests

    named = words[0] if words and words[0][:1] not in "+-" else None
    path = run_path(named)
    requests = parse_switch_words(words[1:] if named else words)
    recorded = Run(path)
    if requests and recorded.ended.how not in ("running", "unknown"):
        raise SondeError(f"{path} does not run any more ({recorded.ended.how}), so its switches have no effect.")
    if requests:
        write_switch_requests(path, requests)
    click.echo(printable(switch_table(recorded), lines=True))
