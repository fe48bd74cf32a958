"""`sonde replay`: runs the step of a capsule again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sonde.errors import SondeError
from sonde.formatting import layer_name, printable

if TYPE_CHECKING:
    from sonde.replay.capsule.create_capsule import Capsule
    from sonde.replay.capsule.replay_capsule_in_script import ReplayResult


@click.command(context_settings={"ignore_unknown_options": True}, options_metavar="[OPTIONS]")
@click.argument("capsule")
@click.option("--script", metavar="FILE", help="The training script, which creates the model and computes the loss.")
@click.option("--model-from", metavar="MODULE:FUNCTION", help="Instead: a function that returns the model, or (model, loss_fn).")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def replay(capsule: str, script: str | None, model_from: str | None, args: tuple[str, ...]) -> None:
    """Replay a capsule and show which operation made the first NaN or Inf.

    The script runs up to the first call of a model that fits the capsule. That call gets the weights, inputs and random state of the
    capsule, and each operation is checked up to the next optimizer step. ARGS are the arguments of the script.

    \b
    Example:  sonde replay runs/base/capsules/step-000041 --script train.py
              sonde replay step-000041 --script train.py -- --lr 0.1
              sonde replay step-000041 --model-from mypackage.models:make_model

    Exit code 0: the origin that is recorded in the capsule (or any, if none is recorded). 1: another origin or none. 2: wrong usage.
    """
    from sonde.replay.capsule.create_capsule import load_capsule
    from sonde.replay.capsule.replay_capsule_in_script import replay_model_from, replay_script
    from sonde.replay.capsule.replay_capsule_with_model import is_same_origin

    loaded = load_capsule(capsule)
    if (script is None) == (model_from is None):
        raise SondeError(
            "A capsule contains numbers and no code: the model has to be given.\n"
            f"Name the script: sonde replay {capsule} --script train.py\n"
            f"or a function:   sonde replay {capsule} --model-from package.module:make_model"
        )
    if script is not None and not Path(script).is_file():
        raise SondeError(f"no file {script} here. Name the script that the capsule was made with.")
    replayed = replay_script(loaded, script, args) if script is not None else replay_model_from(loaded, model_from or "")
    sys.stdout.flush()
    if loaded.origin is None:
        verdict, code = "The capsule has no origin to compare with.", 0 if replayed.origin else 1
    elif is_same_origin(loaded.origin, replayed.origin):
        verdict, code = "It is the origin that is recorded in the capsule.", 0
    else:
        verdict, code = f"The capsule has another origin: {loaded.origin.place}: {loaded.origin.cause}", 1
    _print(loaded, replayed, verdict)
    raise SystemExit(code)


def _print(loaded: Capsule, replayed: ReplayResult, verdict: str) -> None:
    found = replayed.origin.summary() if replayed.origin else "No NaN or Inf appeared in the replay."
    lines = [f"Step {loaded.step} of {loaded.model_class}, replayed.", found, *(f"  note    {note}" for note in replayed.notes), verdict]
    if loaded.findings:
        lines.append("The run had, before that step:")
        lines += [f"  {one['severity']} {one['rule']}{_place(one['where'])}, step {one['step']}: {one['cause']}" for one in loaded.findings]
    click.echo(printable("\n".join(lines), lines=True))


def _place(where: str) -> str:
    return f" in {layer_name(where)}" if where else ""
