"""Trainings whose forward and loss have a side effect of one kind. Each takes a number from what it changes, so a change shows."""

from __future__ import annotations

import collections
import csv
import itertools
import logging
import multiprocessing
import queue
import random
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from guarantees.replay_programs.small_training import INCIDENTS, Draw, main, train

Parts = tuple[Draw, Callable[[], Any]]  # draws a number; the state after the training
ITEMS = [0.25 * (i % 7) for i in range(600)]  # more than the training takes: a replay that took some would not hang, but be seen


def torch_generator(folder: Path) -> Parts:
    own = torch.Generator().manual_seed(3)
    return lambda: torch.rand((), generator=own).item(), lambda: own.get_state().tolist()


def numpy_generator(folder: Path) -> Parts:
    own = np.random.default_rng(3)
    return lambda: float(own.random()), lambda: own.bit_generator.state


def python_generator(folder: Path) -> Parts:
    own = random.Random(3)
    return own.random, own.getstate


def thread_queue(folder: Path) -> Parts:
    items: queue.Queue[float] = queue.Queue()
    for item in ITEMS:
        items.put(item)
    return items.get, lambda: list(items.queue)


def process_queue(folder: Path) -> Parts:
    items = multiprocessing.Queue()
    for item in ITEMS:
        items.put(item)
    items.put(-1.0)
    return items.get, lambda: list(iter(items.get, -1.0))


def pipe(folder: Path) -> Parts:
    reader, writer = multiprocessing.Pipe(duplex=False)
    for item in [*ITEMS, -1.0]:
        writer.send(item)
    return reader.recv, lambda: list(iter(reader.recv, -1.0))


def socket_pair(folder: Path) -> Parts:
    near, far = socket.socketpair()
    far.sendall(struct.pack(f"{len(ITEMS)}d", *ITEMS))

    def draw() -> float:
        near.sendall(b"+")
        return struct.unpack("d", near.recv(8))[0]

    def state() -> Any:
        near.close()
        return far.recv(1 << 16).decode()

    return draw, state


def printing(folder: Path) -> Parts:
    numbers = itertools.count()

    def draw() -> float:
        number = next(numbers)
        print("draw", number)  # noqa: T201
        sys.stderr.write("")
        return 0.01 * number

    return draw, lambda: next(numbers)


def logged(folder: Path) -> Parts:
    log = logging.getLogger(str(folder))
    log.propagate = False
    log.setLevel(logging.INFO)
    for handler in (logging.FileHandler(folder / "log"), logging.StreamHandler(sys.stdout)):
        log.addHandler(handler)
    numbers = itertools.count()

    def draw() -> float:
        number = next(numbers)
        log.info("draw %d", number)
        return 0.01 * number

    return draw, lambda: next(numbers)


def csv_opened_before(folder: Path) -> Parts:
    file = open(folder / "rows.csv", "w", newline="")  # noqa: SIM115
    rows, numbers = csv.writer(file), itertools.count()

    def draw() -> float:
        number = next(numbers)
        rows.writerow([number, "x" * 4000])  # its buffer is written out with every second row
        return 0.01 * number

    return draw, file.close


def csv_opened_inside(folder: Path) -> Parts:
    numbers = itertools.count()

    def draw() -> float:
        number = next(numbers)
        with open(folder / "rows.csv", "a", newline="") as file:
            csv.writer(file).writerow([number])
        return 0.01 * number

    return draw, lambda: next(numbers)


def counter(folder: Path) -> Parts:
    counted = collections.Counter()

    def draw() -> float:
        counted["draws"] += 1
        return 0.01 * counted["draws"]

    return draw, lambda: counted["draws"]


def ring(folder: Path) -> Parts:
    values = collections.deque(ITEMS[:7], maxlen=7)

    def draw() -> float:
        values.append(0.9 * values.popleft() + 0.1)
        return values[-1]

    return draw, lambda: list(values)


def iterator(folder: Path) -> Parts:
    ids = iter(ITEMS)
    return lambda: next(ids), lambda: list(ids)


def nested(folder: Path) -> Parts:
    state = SimpleNamespace(meters={"loss": [SimpleNamespace(values=[0.5], seen=set())]})

    def draw() -> float:
        meter = state.meters["loss"][0]
        meter.values.append(0.9 * meter.values[-1] + 0.01)
        meter.seen.add(len(meter.values))
        return meter.values[-1]

    return draw, lambda: [state.meters["loss"][0].values, sorted(state.meters["loss"][0].seen)]


EFFECTS: tuple[Callable[[Path], Parts], ...] = (
    torch_generator, numpy_generator, python_generator, thread_queue, process_queue, pipe, socket_pair, printing, logged, csv_opened_before,
    csv_opened_inside, counter, ring, iterator, nested,
)  # fmt: skip


def run(effect: Callable[[Path], Parts], folder: Path, incident: str, watched: bool) -> Any:
    draw, state = effect(folder)
    return {**train(folder, incident, watched, draw), "state": state()}


if __name__ == "__main__":
    main({effect.__name__: partial(run, effect) for effect in EFFECTS}, INCIDENTS)
