"""SondeCallback in the Trainer of transformers, on a GPT-2 made from a configuration."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sonde[transformers]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'sonde[transformers]'")

import sonde  # noqa: E402
from framework_trainings import NUM_BATCHES, gpt2, logged, silenced, trainer  # noqa: E402
from sonde.integrations.transformers import SondeCallback, num_batches_of_step  # noqa: E402

pytestmark = pytest.mark.torch
ACCUMULATES = 5
STEPS = -(-NUM_BATCHES // ACCUMULATES)
SETTINGS = {
    "gradient_accumulation_steps": ACCUMULATES, "logging_steps": 1, "num_train_epochs": 2, "eval_strategy": "epoch", "max_grad_norm": 0.5,
}  # fmt: skip


class Stop:
    """Made into a callback: does something when that many updates are done."""

    def __new__(cls, at, act):
        from transformers import TrainerCallback

        def on_step_end(self, args, state, control, **given):
            if state.global_step == at:
                act(control)

        return type("Stop", (TrainerCallback,), {"on_step_end": on_step_end})()


def stop(control):
    control.should_training_stop = True


def fail(control):
    raise ZeroDivisionError("planted")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    callback = SondeCallback(to=path / "run", every=1, strict=True)
    model = gpt2()
    with silenced():
        trainer(path, model, callback, **SETTINGS).train()
    return model, callback, sonde.Run(callback.run)


def test_training_is_the_same_to_the_last_bit(watched, tmp_path):
    bare = gpt2()
    with silenced():
        trainer(tmp_path, bare, **SETTINGS).train()
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), watched[0].parameters()))


def test_an_update_is_a_step_however_many_batches_it_accumulates(watched):
    backwards = [step.scalars["backwards"] for step in watched[2].steps()]
    assert backwards == ([5.0] * (STEPS - 1) + [float(NUM_BATCHES % ACCUMULATES)]) * 2


def test_the_loss_of_a_step_is_the_one_that_the_trainer_logs(watched):
    ours = [step.scalars["loss"] for step in watched[2].steps()]
    assert ours == pytest.approx(logged(watched[2], "logged/loss"), rel=1e-5)


def test_gradients_are_those_after_clipping_and_the_logged_norm_is_the_one_before(watched):
    (event,) = watched[2].events("integration")
    assert (event.data["clipping"], event.data["clips_at"]) == ("clipped", 0.5)
    ours = [step.scalars["grad_norm"] for step in watched[2].steps()]
    theirs = logged(watched[2], "grad_norm_unclipped")
    assert any(norm > 0.5 for norm in theirs)
    assert ours == pytest.approx([min(norm, 0.5) for norm in theirs], rel=1e-4)


def test_evaluation_inside_of_the_training_is_told_apart(watched):
    evaluations = [step.scalars["eval_forwards"] for step in watched[2].steps()]
    assert [i for i, num in enumerate(evaluations) if num] == [STEPS]
    assert len(logged(watched[2], "eval_loss")) == 2


def test_epochs_are_events(watched):
    assert [(event.step, event.data["epoch"]) for event in watched[2].events("epoch")] == [(0, 0), (STEPS, 1)]


def test_a_finished_training_says_so_and_leaves_nothing_behind(watched):
    model, callback, run = watched
    assert [event.data["stopped_early"] for event in run.events("training_end")] == [False]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert callback.report().verdict == "healthy"


def test_a_resumed_training_that_stops_early_says_both(tmp_path):
    callback = SondeCallback(to=tmp_path / "run", strict=True)
    with silenced():
        trainer(tmp_path, gpt2(), max_steps=3, save_strategy="steps", save_steps=3).train()
        trainer(tmp_path, gpt2(), callback, Stop(5, stop), max_steps=9).train(resume_from_checkpoint=True)
    run = sonde.Run(callback.run)
    assert [event.data["resumed_at"] for event in run.events("integration")] == [3]
    assert [(event.data["framework_step"], event.data["stopped_early"]) for event in run.events("training_end")] == [(5, True)]
    assert len(list(run.steps())) == 2


def test_an_exception_inside_of_the_callbacks_block_ends_the_run_with_its_words(tmp_path):
    with silenced(), pytest.raises(ZeroDivisionError), SondeCallback(to=tmp_path / "run", strict=True) as callback:
        trainer(tmp_path, gpt2(), callback, Stop(2, fail)).train()
    assert [event.data["exception"] for event in sonde.Run(callback.run).events("end")] == ["ZeroDivisionError: planted"]


def test_a_training_that_failed_is_closed_when_the_next_one_begins(tmp_path):
    callback = SondeCallback(config=sonde.DebugConfig(output_dir=str(tmp_path / "runs")), strict=True)
    with silenced():
        with pytest.raises(ZeroDivisionError):
            trainer(tmp_path, gpt2(), callback, Stop(2, fail)).train()
        failed = callback.run
        trainer(tmp_path, gpt2(), callback, max_steps=2).train()
    assert failed != callback.run
    assert [event.data["how"] for event in sonde.Run(failed).events("end")] == ["exception"]
    assert [event.data["how"] for event in sonde.Run(callback.run).events("end")] == ["finished"]


@pytest.mark.parametrize("num_steps, num_batches, expected", [(0, 7, 3), (1, 7, 3), (2, 7, 1), (3, 7, 3), (5, 7, 1), (1, 6, 3), (0, 2, 2)])
def test_the_last_step_of_an_epoch_has_the_batches_that_are_left(num_steps, num_batches, expected):
    assert num_batches_of_step(3, num_steps, range(num_batches)) == expected


def test_a_stream_has_no_last_step():
    assert num_batches_of_step(3, 2, iter(range(7))) == 3
