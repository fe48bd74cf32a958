"""Verdicts do not depend on when the answer of a search comes: at once, or 50 steps later."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import warm
from launcher import run_under_sonde

from sonde.report import judge
from sonde.runlog.reader import Run

HERE = Path(__file__).parent
PROGRAMS = [
    "bad_numbers/b08_triplet_distance.py",
    "sick/loss_spike/mlp.py",
    "sick/gradient_spike/critic.py",
    "sick/loss_scale_collapse/mlp.py",
    "bad_numbers/b21_scaler_log_area.py",
    "sick/nonfinite_loss/regression.py",
]
MORE = ["sick/loss_spike/gru.py", "sick/gradient_spike/bandit.py", "sick/loss_scale_collapse/cnn.py", "bad_numbers/b52_accumulated_poisson.py",
        "bad_numbers/b29_masked_mean.py", "healthy/k57_scaler_grows_often.py", "healthy/k59_heavy_tails.py", "good_infinities/g06_scaler_warm_up.py"]

# `sonde run` of a process whose searches are answered 50 polls, which are 50 steps, after they ended.
LATE = """
    import sys
    from sonde.incidents import replay_search

    class Late(replay_search.ReplayChild):
        num_polls = 0
        def poll(self, timeout_s=0.0):
            self.num_polls += 1
            if timeout_s >= replay_search.LIMIT_S:  # the training waits for it, or is over
                return super().poll(timeout_s)
            return super().poll(timeout_s) if self.num_polls > 50 else None

    replay_search.ReplayChild, replay_search.WAIT_S = Late, 0.0
    from sonde.cli import main
    sys.argv = ["sonde", "run", "--to", sys.argv[1], sys.argv[2]]
    main()
"""


def verdicts(run):
    keys = ("step", "rule", "severity", "cause", "title", "where")
    return [{key: str(getattr(finding, key)) for key in keys if hasattr(finding, key)} for finding in judge(run).findings
            if finding.severity.rank > 0 and finding.rule not in TIMING]


TIMING = {"slow-step-outliers", "python-bound", "host-sync", "input-bound", "slow-layer", "cpu-oversubscribed", "unfused-optimizer"}


@pytest.mark.torch
@pytest.mark.parametrize("program", [*PROGRAMS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_verdicts_are_the_same_if_every_answer_comes_50_steps_later(program, tmp_path):
    (tmp_path / "now").mkdir()
    run, _, output = run_under_sonde(HERE / program, tmp_path / "now")
    assert run.is_dir(), output
    (tmp_path / "later").mkdir()
    done = warm.python("-c", textwrap.dedent(LATE), tmp_path / "later" / "run", (HERE / program).resolve(), cwd=tmp_path / "later")
    late = tmp_path / "later" / "run"
    assert late.is_dir(), done.stderr
    assert verdicts(late) == verdicts(run)
    assert judge(late).verdict == judge(run).verdict
    kinds = ("origin", "origin_unknown", "spike", "overflow")
    steps = [sorted((event.kind, event.step) for kind in kinds for event in Run(path).events(kind)) for path in (run, late)]
    assert steps[0] == steps[1]
