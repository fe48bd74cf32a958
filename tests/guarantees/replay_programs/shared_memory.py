"""Trainings whose forward or loss writes to memory that a forked process shares with its parent."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from guarantees.replay_programs.small_training import NUM_STEPS, main, train


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8 * NUM_STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def loader_batch(folder: Path, incident: str, watched: bool) -> Any:
    loader = DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    return train(folder, incident, watched, lambda: 0.0, batches=loader, change=lambda x: x.mul_(1.1).add_(0.1))


def shared_buffers(folder: Path, incident: str, watched: bool) -> Any:
    return train(folder, incident, watched, lambda: 0.0, share=True)


def memory_map(folder: Path, incident: str, watched: bool) -> Any:
    rows = np.memmap(folder / "rows", np.float64, "w+", shape=(5000,))

    def draw() -> float:
        rows[0] += 1
        rows[int(rows[0])] = rows[0]
        return float(rows[0]) * 0.01

    return {**train(folder, incident, watched, draw), "rows": rows.tolist()}


def file_tensor(folder: Path, incident: str, watched: bool) -> Any:
    counts = torch.from_file(str(folder / "counts"), shared=True, size=16, dtype=torch.float32)
    counts.zero_()

    def draw() -> float:
        counts.add_(torch.arange(16))
        return 1e-3 * counts[1].item()

    return {**train(folder, incident, watched, draw), "counts": counts.tolist()}


def process_value(folder: Path, incident: str, watched: bool) -> Any:
    value = multiprocessing.Value("d", 0.0)

    def draw() -> float:
        with value.get_lock():
            value.value += 0.01
        return value.value

    return {**train(folder, incident, watched, draw), "value": value.value}


def process_event(folder: Path, incident: str, watched: bool) -> Any:
    event = multiprocessing.Event()

    def draw() -> float:
        was_set = event.is_set()
        event.clear() if was_set and torch.rand(()) < 0.5 else event.set()
        return float(was_set)

    return {**train(folder, incident, watched, draw), "event": event.is_set()}


def process_lock(folder: Path, incident: str, watched: bool) -> Any:
    lock, held = multiprocessing.Lock(), multiprocessing.Semaphore(200)

    def draw() -> float:
        with lock:
            held.acquire(block=False)
        return 0.01

    outcome = train(folder, incident, watched, draw)
    return {**outcome, "lock": lock.acquire(block=False), "held": held.get_value()}


def deleted_iterator(folder: Path, incident: str, watched: bool) -> Any:
    """The loss deletes a loader's iterator some calls after the incident: a replay, which calls it often, deletes its copy."""
    batches: dict[str, Any] = {"iterator": iter(DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")), "num": 0}

    def draw() -> float:
        batches["num"] += 1
        if batches["num"] == 2 * NUM_STEPS - 4:
            del batches["iterator"]
        return 0.01

    def inputs() -> Any:
        while True:
            yield torch.cat([next(batches["iterator"]) for _ in range(8)]) if "iterator" in batches else torch.ones(8, 4)

    return train(folder, incident, watched, draw, batches=inputs())


PROGRAMS = (loader_batch, shared_buffers, memory_map, file_tensor, process_value, process_event, process_lock, deleted_iterator)

if __name__ == "__main__":
    main({program.__name__: program for program in PROGRAMS}, ("nan", "spike"))
