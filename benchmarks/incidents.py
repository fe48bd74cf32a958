"""What an incident costs the training: the wait for the answer, the time of the next steps, and the memory that is copied.

    python benchmarks/incidents.py                 processes with 0.5, 2 and 8 GB of parameters, gradients and optimizer state
    python benchmarks/incidents.py --gb 0.5 --runs 5

A bare and a watched training take turns, each in a process of its own. The loss of one step is NaN: Sonde forks, and the child runs that
step again. While the child lives, the kernel copies every page that the training writes. Shown are medians over the runs: seconds of the
step with the NaN and of the step after it, bare and watched, and by how much the free memory of the machine fell at most (a bare step of
the same size allocates some too).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Event, Thread
from time import perf_counter

WIDTH = 4096
BAD_STEP = 4
NUM_STEPS = 8
NUM_STATES = 4  # a parameter, its gradient and two numbers of AdamW


def available_gb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 2**20


def train(gigabytes: float, is_watched: bool) -> dict[str, object]:
    """One training, in this process."""
    import torch
    from torch import nn

    import sonde

    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_layers = max(1, round(gigabytes * 2**30 / (NUM_STATES * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    for p in model.parameters():
        nn.init.constant_(p, 1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)
    session = sonde.watch(model, optimizer, to=tempfile.mkdtemp(), every=10**9) if is_watched else None
    seconds, least, stop = [], [available_gb()], Event()
    before = least[0]

    def sample() -> None:
        while not stop.wait(0.01):
            least[0] = min(least[0], available_gb())

    sampler = Thread(target=sample)
    for step in range(NUM_STEPS):
        x = torch.randn(16, WIDTH)
        if step == BAD_STEP - 1:
            least[0] = available_gb()
            before = least[0]
            sampler.start()
        began = perf_counter()
        out = model(x).square().mean()
        loss = (out * 0).log() if step == BAD_STEP else out
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if step == BAD_STEP:
            for p in model.parameters():
                p.grad.zero_()  # the weights stay finite, so that the steps after it are like those before
        optimizer.step()
        seconds.append(perf_counter() - began)
    stop.set()
    sampler.join()
    answers: list[float] = []
    if session is not None:
        session.close()
        answers = [float(event.data["look_back_ms"]) for event in sonde.Run(session.run).events("origin")]
    return {"seconds": seconds, "fell_gb": before - least[0], "answers_ms": answers}


def measure(gigabytes: float, is_watched: bool) -> dict[str, object]:
    command = [sys.executable, __file__, "--one", str(gigabytes), "watched" if is_watched else "bare"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    answer: dict[str, object] = json.loads(output.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="What an incident costs the training.")
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2.0, 8.0], help="of parameters, gradients and optimizer state")
    parser.add_argument("--runs", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(train(float(arguments.one[0]), arguments.one[1] == "watched")))
        return
    print("| state | usual step | step with the NaN, bare / watched | next step, bare / watched | answer after | memory, bare / watched |")
    print("|---|---|---|---|---|---|")
    for gigabytes in arguments.gb:
        runs: dict[bool, list[dict[str, object]]] = {False: [], True: []}
        for _ in range(arguments.runs):
            for is_watched in (False, True):
                runs[is_watched].append(measure(gigabytes, is_watched))

        def median(is_watched: bool, step: int, runs: dict[bool, list[dict[str, object]]] = runs) -> float:
            return statistics.median(run["seconds"][step] for run in runs[is_watched])  # type: ignore[index]

        answers = [ms for run in runs[True] for ms in run["answers_ms"]]  # type: ignore[attr-defined]
        fell = [statistics.median(float(run["fell_gb"]) for run in runs[kind]) for kind in (False, True)]  # type: ignore[arg-type]
        print(
            f"| {gigabytes:g} GB | {median(False, BAD_STEP - 1):.2f} s | {median(False, BAD_STEP):.2f} / {median(True, BAD_STEP):.2f} s "
            f"| {median(False, BAD_STEP + 1):.2f} / {median(True, BAD_STEP + 1):.2f} s "
            f"| {statistics.median(answers) / 1e3 if answers else float('nan'):.2f} s | {fell[0]:.2f} / {fell[1]:.2f} GB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
