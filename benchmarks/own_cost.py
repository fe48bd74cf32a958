"""Is what Sonde says of its own cost true? Runs trainings alternately with and without it and compares the difference with the verdict.

    python benchmarks/own_cost.py                        all trainings (half an hour on a quiet machine)
    python benchmarks/own_cost.py mlp gan --rounds 5     some of them
    python benchmarks/own_cost.py mlp -- --every 1       with options of `sonde run`

Times are CPU milliseconds of the loop per step. The cost is the median over the rounds of the difference of a pair, with its quartiles;
"stated" is the median of what the verdicts say. Both have to agree within a quarter, unless the quartiles of the pairs are further apart
than that: then a pair cannot show it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from machine import facts
from own_cost_trainings import TRAININGS

AGREED = 0.25
PROGRAM = str(Path(__file__).with_name("own_cost_trainings.py"))


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def measure(name: str, num_steps: int, rounds: int, options: list[str]) -> bool:
    """Whether the stated cost agrees with that of the pairs."""
    bare, watched, stated = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for each in range(rounds):
            target = f"{folder}/{each}"
            bare.append(float(run(PROGRAM, name, str(num_steps))))
            watched.append(float(run("-m", "sonde", "run", "--quiet", "--to", target, *options, PROGRAM, name, str(num_steps))))
            overhead = json.loads(run("-m", "sonde", "diagnose", target, "--json"))["overhead"]
            stated.append(overhead["own_ms"] / num_steps)
    cost = [after - before for before, after in zip(bare, watched)]
    low, _, high = quantiles(cost, n=4)
    true, said = median(cost), median(stated)
    is_shown = high - low < 2 * AGREED * abs(true)
    agrees = abs(said - true) <= AGREED * abs(true) or low <= said <= high
    word = "agrees" if agrees else "DIFFERS" if is_shown else "not shown by the pairs"
    print(
        f"{name:18} step {median(bare):8.3f} ms  cost {true:7.4f} ({low:.4f} to {high:.4f})  stated {said:7.4f} ms"
        f"  {100 * true / median(bare):5.1f} %  stated/cost {said / true if true else float('nan'):5.2f}  {word}",
        flush=True,
    )
    return agrees or not is_shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRAININGS)}")
    parser.add_argument("--rounds", type=int, default=9)
    arguments, options = parser.parse_known_args()
    print(facts())
    names = [name for name in arguments.names if name in TRAININGS] or list(TRAININGS)
    results = [measure(name, TRAININGS[name][1], arguments.rounds, [each for each in options if each != "--"]) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
