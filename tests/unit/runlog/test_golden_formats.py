"""R40: runs of every released format stay readable for good. The files in golden/ are never made again."""

import importlib.util
import math
from pathlib import Path

import numpy as np

from sonde.events import STATISTICS, Event
from sonde.runlog.run_reader import Run

HERE = Path(__file__).parent / "golden"
_spec = importlib.util.spec_from_file_location("golden_make", HERE / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)

LOG = HERE / "format-1" / "rank0-golden-1-0-000.sonde"


def test_r40_a_format_1_run_is_read_to_the_last_number():
    run = Run(HERE / "format-1")
    assert run.info["name"] == "golden"
    assert (run.damage, run.torn, run.num_unknown) == ([], [], 1)
    assert run.manifests == [make.MANIFEST]
    assert list(run.sites.values()) == make.SITES
    assert [step.number for step in run.steps()] == [0, 1, 2, 3, 4]
    for step in run.steps():
        assert np.array_equal([step.scalar("loss"), step.scalar("lr")], make.losses(step.number).ravel(), equal_nan=True)
        assert set(step.frames) == ({"batch", "gradient", "gradient_exponents"} if step.number % 2 == 0 else set())
        if step.frames:
            gradient = step.frames["gradient"]
            assert gradient.fields == STATISTICS
            assert gradient.values.T.tolist().__repr__() == make.gradients(step.number).astype("f4").tolist().__repr__()
            assert step.frames["batch"].values.T.tolist() == make.batch(step.number).tolist()
            assert step.frames["gradient_exponents"].sites.tolist() == [2, 2, 3]
    assert [event.kind for event in run.events()] == ["start", "nonfinite", "end"]
    start = next(run.events("start"))
    assert start.data["huge"] == 10**40
    assert math.isnan(start.data["odd"][0])
    assert next(step for step in run.steps() if step.number == 3).events == (
        Event("nonfinite", 3, {"what": "loss", "where": "", "num_nan": 1}),
    )
    assert [tuple(gap) for gap in run.gaps] == [(4, 2, 3, "[Errno 28] No space left on device")]
    assert (run.ended.how, run.ended.exit_code, run.ended.exception, run.last_step) == ("exception", 1, "ValueError: no", 4)


def test_r40_todays_writer_still_writes_the_very_same_bytes():
    assert make.content() == LOG.read_bytes()
