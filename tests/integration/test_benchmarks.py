"""The benchmarks are not type-checked: the one that makes long logs uses the format of the log, so it is run on a short one."""

import importlib.util
from pathlib import Path

from sonde.report import diagnose


def test_the_benchmark_of_diagnose_extends_a_log_to_a_valid_longer_one(sample_run):
    path = Path(__file__).parents[2] / "benchmarks" / "diagnose.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_diagnose", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    run = sample_run("short", [1.0 / (step + 1) for step in range(40)])
    (log,) = run.glob("*.sonde")
    benchmark.extend(log, 40, 130)
    report = diagnose(run)
    assert (report.run.num_steps, report.run.last_step, report.damage) == (130, 129, ())
