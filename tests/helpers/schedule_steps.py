"""Steps of trainings under a learning rate scheduler."""

from __future__ import annotations

from sonde.events import Event
from synthetic_steps import falling, opening, training

EPOCH = 20  # updates


def made(kind="StepLR", index=0, **given):
    about = {"class": kind, "scheduler": index, "optimizer": 0, "rates": [0.1], "initial": [0.1], "plan": {}, "parts": [], "heard": True,
             "last_epoch": 0, "source": "train.py:13", "text": f"scheduler = {kind}(optimizer)"}  # fmt: skip
    return Event("scheduler", 0, about | given)


def begins(step=0, index=0, **given):
    about = {"scheduler": index, "given": False, "before_optimizer": False, "last_epoch": 1, "source": "train.py:25"}
    return Event("scheduler_begins", step, about | given)


LINE = Event("source", 0, {"call": "scheduler_step", "line": "train.py:25", "text": "scheduler.step()"})
END = Event("end", 0, {"how": "finished", "exit_code": 0, "exception": ""})


def passes(num, planned=None, length=EPOCH):
    more = [{} if planned is None else {"planned": planned, "at": at, "loop": "train.py:15", "breaks": []} for at in range(num)]
    return {at * length: [Event("pass", at * length, {"loader": 0, "num": at + 1, "num_batches": length, **more[at]})] for at in range(num)}


def run(num_steps=200, *, scheduler, rate=lambda s: 0.1, every=1, epochs=True, planned=None, ended=True, loss=falling, first=None, more=()):
    """A training under one scheduler, which is stepped `every` so many updates (0: never)."""
    events = passes(num_steps // EPOCH, planned) if epochs else {}
    start = [*opening(), scheduler, *more]
    if every:
        start += [LINE, first or begins(0 if every == 1 else every)]
    steps = training(
        num_steps, loss=loss, events=events, start=start,
        scalars=lambda s: {"lr": rate(s), "scheduler_steps": float(bool(every) and s > 0 and s % every == 0), "eval_forwards": 0.0},
    )  # fmt: skip
    return [*steps[:-1], _with(steps[-1], END)] if ended else steps


def _with(step, event):
    return type(step)(step.number, step.rank, step.scalars, step.frames, (*step.events, event), step.sites)
