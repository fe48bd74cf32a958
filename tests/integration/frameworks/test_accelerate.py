"""SondeTracker in a loop of accelerate."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'sonde[accelerate]'")

import fork_server  # noqa: E402
import sonde  # noqa: E402
from framework_trainings import NUM_BATCHES, Babbler, loader, logged, loss_of, optimizer_of, silenced  # noqa: E402
from sonde.integrations.accelerate import SondeTracker  # noqa: E402

pytestmark = pytest.mark.torch


def train(tracker=None, *, accumulates=1, clips=0.0):
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with silenced():
        accelerator = accelerate.Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=accumulates)
        torch.manual_seed(0)
        model = Babbler()
        accelerator.init_trackers("babble", config={"lr": 0.01, "layers": None})
        model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader())
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clips)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss.item(), "words": 7, "note": "fine", "pair": (1, 2)}, step=number)
        accelerator.end_training()
    return model


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    tracker = SondeTracker(to=tmp_path_factory.mktemp("runs") / "run", every=1, strict=True)
    return train(tracker, accumulates=5, clips=0.05), tracker, sonde.Run(tracker.run)


def test_training_is_the_same_to_the_last_bit(watched):
    assert all(torch.equal(a, b) for a, b in zip(train(accumulates=5, clips=0.05).parameters(), watched[0].parameters()))


def test_losses_are_recorded_undivided_also_where_the_last_update_has_fewer_batches(watched):
    theirs, steps = logged(watched[2], "logged/loss"), list(watched[2].steps())
    assert [step.scalars["backwards"] for step in steps] == [5.0] * (NUM_BATCHES // 5) + [float(NUM_BATCHES % 5)]
    groups = [theirs[i : i + 5] for i in range(0, NUM_BATCHES, 5)]
    assert [step.scalars["loss"] for step in steps] == pytest.approx([sum(group) / len(group) for group in groups], rel=1e-5)


def test_gradients_are_those_after_clipping(watched):
    assert all(step.scalars["grad_norm"] <= 0.0501 and step.scalars["clips"] == 1 for step in watched[2].steps())


def test_what_is_logged_is_kept_as_far_as_it_is_a_number_or_a_text(watched):
    assert logged(watched[2], "words") == [7.0] * NUM_BATCHES
    assert {(event.data["name"], event.data["text"]) for event in watched[2].events("log")} == {("note", "fine")}


def test_the_configuration_is_kept(watched):
    assert [event.data["values"] for event in watched[2].events("configuration")] == [{"lr": 0.01, "layers": None}]


def test_the_end_of_the_training_ends_the_run_and_leaves_nothing_behind(watched):
    model, tracker, run = watched
    assert [event.data["how"] for event in run.events("end")] == ["finished"]
    assert not any(part._forward_hooks for part in model.modules())
    assert tracker.report().verdict == "healthy"


def test_accelerate_takes_it_for_a_tracker():
    assert isinstance(SondeTracker(), accelerate.tracking.GeneralTracker)


RANKS = """
import os, sys, torch, sonde
first, second = os.getpid(), os.fork()
rank = 0 if second else 1
torch.distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"), rank=rank, world_size=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with sonde.watch(model, optimizer, to="run"):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
torch.distributed.destroy_process_group()
if not second:
    os._exit(0)
os.waitpid(second, 0)
"""


def test_ranks_that_a_framework_started_without_torchruns_variables_share_one_run(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    done = fork_server.python("ranks.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = sonde.Run(tmp_path / "run")
    assert run.ranks == [0, 1]
    assert [len(list(run.steps(rank=rank))) for rank in (0, 1)] == [3, 3]
