"""The command line: one file per command, listed here.

A command parses, calls and prints. It imports what it needs when it is called, so that `sonde --help` is fast and runs can be read on a
machine without torch.
"""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

import click

from sonde.errors import NO_ROOM, OutputExistsError, SondeError
from sonde.script_runner import end_by_interrupt, remove_from_path

COMMANDS = (
    "run", "diagnose", "report", "explain", "runs", "compare", "baseline", "export", "compact",
    "switch", "replay", "profile", "tune", "memory", "doctor", "demo",
)  # fmt: skip

INTERRUPTED = 130  # 128 + SIGINT and
BROKEN_PIPE = 141  # 128 + SIGPIPE, as in a shell


class CommandList(click.Group):
    """The group of `COMMANDS`; each is the function of that name in the module of that name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS)
            ctx.fail(f"there is no command {cmd_name!r}." + (f"\nNearest: {', '.join(near)}" if near else ""))
        command = getattr(import_module(f"sonde.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from sonde import __version__

        click.echo(f"sonde {__version__}")
        ctx.exit()


@click.group(cls=CommandList, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
def group() -> None:
    """Find out what is wrong with a PyTorch training.

    \b
    Example:  sonde run train.py --lr 0.1  (watch a script, which needs no change)
              sonde diagnose               (the verdict on the newest run)
              sonde demo                   (five small trainings, about a minute)

    RUN is a run directory, or the name of a run or a part of it; the newest run by default.
    Exit codes: 0 no problems, 1 problems, 2 wrong usage, 3 unknown (with --check).
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave the process with its exit code."""
    with suppress(OSError):  # the working directory was deleted
        remove_from_path(os.path.dirname(os.path.realpath(sys.argv[0])))
    run_script: Callable[[], int] | None = None
    try:
        result = _call(list(sys.argv[1:] if arguments is None else arguments))
        if not isinstance(result, int):
            # A script runs here and not inside of click, so that it has nearly the stack that it has alone.
            run_script = result
            raise SystemExit(run_script())  # Python flushes and closes what the script has left of stdout
        code = result
        if sys.stdout is not None:  # None: the process was started with a closed stdout
            sys.stdout.flush()
    except OutputExistsError as error:
        code = _print_error(error.on_command_line, error.exit_code)
    except SondeError as error:
        code = _print_error(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:  # whose message is the help
        click.echo(error.format_message(), err=True)
        code = error.exit_code
    except click.UsageError as error:
        hint = f'\nSee "{error.ctx.command_path} --help".' if error.ctx is not None else ""
        code = _print_error(error.format_message() + hint, error.exit_code)
    except click.ClickException as error:
        code = _print_error(error.format_message(), 2)
    except KeyboardInterrupt:
        if run_script is not None:
            end_by_interrupt()
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe. The rest of the buffer must not raise again when the interpreter flushes it.
        _silence_stdout()
        code = BROKEN_PIPE
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _silence_stdout()
        code = _print_error(f"the output could not be written: {error.strerror}.\nFree some space, or write it elsewhere.", 2)
    raise SystemExit(code)


def _call(arguments: list[str]) -> int | Callable[[], int]:
    """The exit code of a command; of `sonde run`, what runs the script and returns its exit code."""
    # Not group.main(): it ends the process itself when a pipe breaks, with the code that means "problems found".
    try:
        with group.make_context("sonde", arguments) as context:
            result = group.invoke(context)
    except click.exceptions.Exit as request:
        return request.exit_code
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else 0
    return result if callable(result) else 0


def _silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(message: str, exit_code: int) -> int:
    """Print an error message to stderr, without control characters, and return the exit code."""
    from sonde.formatting import printable

    first, *rest = printable(message, lines=True).splitlines() or [""]
    click.echo("\n".join([f"sonde: {first}", *(f"       {line}" for line in rest)]), err=True)
    return exit_code
