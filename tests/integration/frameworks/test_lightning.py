"""SondeCallback in a Trainer of Lightning: what the run knows, and that nothing else changes."""

from __future__ import annotations

import copy
import math
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning", reason="lightning is not installed: pip install 'sonde[lightning]'")

import sonde  # noqa: E402
from framework_trainings import NUM_BATCHES, lightning_module, lightning_trainer, loader, logged, silenced  # noqa: E402
from sonde.integrations import lightning as integration  # noqa: E402
from sonde.integrations.lightning import UNUSED, SondeCallback  # noqa: E402

pytestmark = pytest.mark.torch
LIMIT = NUM_BATCHES // 2 - 1  # batches of an epoch: odd, so that the last step of it accumulates one batch alone
STEPS = (LIMIT + 1) // 2
SETTINGS = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "limit_train_batches": LIMIT, "limit_val_batches": 2}


def fit(module, *callbacks, **settings):
    import lightning.pytorch as pl

    with silenced():
        trainer = lightning_trainer(pl, callbacks=list(callbacks), **settings)
        trainer.fit(module, loader(), loader())
    return trainer


def module():
    import lightning.pytorch as pl

    return lightning_module(pl)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Two epochs that accumulate, clip and validate, with their module and callback."""
    callback = SondeCallback(to=tmp_path_factory.mktemp("runs") / "run", every=1, strict=True)
    trained = module()
    fit(trained, callback, **SETTINGS)
    return trained, callback, sonde.Run(callback.run)


def test_training_is_the_same_to_the_last_bit(watched):
    bare = module()
    fit(bare, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), watched[0].parameters()))


def test_an_update_is_a_step_however_many_batches_it_accumulates(watched):
    backwards = [step.scalars["backwards"] for step in watched[2].steps()]
    assert backwards == ([2.0] * (STEPS - 1) + [1.0]) * 2


def test_losses_are_recorded_undivided_also_where_the_last_update_has_fewer_batches(watched):
    first, *_, last = [step.scalars["loss"] for step in watched[2].steps()][:STEPS]
    assert first == pytest.approx(math.log(16), rel=0.1)  # guessing among 16 words
    assert last == pytest.approx(first, rel=0.3)


def test_gradients_are_those_after_clipping(watched):
    (event,) = watched[2].events("integration")
    assert (event.data["clipping"], event.data["clips_at"], event.data["accumulates"]) == ("clipped", 0.05, 2)
    assert all(step.scalars["grad_norm"] <= 0.0501 and step.scalars["clips"] == 1 for step in watched[2].steps())


def test_the_sanity_check_is_not_part_of_the_training_and_validation_is(watched):
    evaluations = [step.scalars["eval_forwards"] for step in watched[2].steps()]
    assert evaluations[:STEPS] == [0.0] * STEPS
    assert evaluations[STEPS] > 0


def test_the_outputs_of_parts_are_measured_although_the_module_itself_is_never_called(watched):
    step = next(iter(watched[2].steps()))
    assert {site.path for site, _ in step.table("activation")} == {"words", "body.0", "body.1", "body.2", "body.3", "head"}


def test_epochs_are_events(watched):
    assert [(event.step, event.data["epoch"]) for event in watched[2].events("epoch")] == [(0, 0), (STEPS, 1)]


def test_what_the_module_logs_is_kept_and_what_the_sanity_check_logs_is_not(watched):
    assert len(logged(watched[2], "val_loss")) == 2
    assert len(set(logged(watched[2], "train_loss"))) >= 2 * STEPS


def test_a_finished_training_says_so_and_leaves_nothing_behind(watched):
    trained, callback, run = watched
    (end,) = run.events("training_end")
    assert (end.data["framework_step"], end.data["stopped_early"]) == (2 * STEPS, False)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in trained.modules())
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert callback.report().verdict == "healthy"


def test_a_copy_of_a_callback_is_a_callback_without_the_session(watched):
    again = copy.deepcopy(watched[1])
    assert type(again) is type(watched[1])
    assert (again.session, again.run) == (None, None)


def test_lightning_is_not_made_to_call_hooks_that_do_nothing_but_those_of_a_derived_class(tmp_path):
    class Derived(SondeCallback):
        num_backwards = 0

        def on_after_backward(self, trainer, pl_module):
            self.num_backwards += 1
            super().on_after_backward(trainer, pl_module)

        def on_train_batch_end(self, trainer, pl_module, *args):
            super().on_train_batch_end(trainer, pl_module, *args)
            super().on_before_backward(trainer, pl_module, None)  # which is there to be called

    callback = Derived(to=tmp_path / "run", strict=True)
    fit(module(), callback, max_epochs=1, limit_train_batches=4)
    assert callback.num_backwards == 4
    assert not any(callable(getattr(callback, hook)) for hook in UNUSED if hook != "on_after_backward")


def test_lightning_calls_at_the_end_of_a_batch_only_where_metrics_are_due(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(SondeCallback, "_log_new", lambda self, trainer: calls.append(trainer.global_step))
    callback = SondeCallback(to=tmp_path / "run", strict=True)
    asked = []
    spy = module()
    spy.on_train_batch_end = lambda outputs, batch, batch_idx: asked.append(callable(callback.on_train_batch_end))
    fit(spy, callback, max_epochs=1, limit_train_batches=9, limit_val_batches=0, log_every_n_steps=4)
    assert calls == [0, 4, 8, 9]  # as the epoch begins, twice in it, and at the end
    assert asked == [number % 4 == 0 for number in range(1, 10)]
    assert SondeCallback.on_train_batch_end is type(callback).on_train_batch_end


def test_an_exception_ends_the_run_with_its_words(tmp_path):
    failing = module()
    failing.on_train_batch_end = lambda outputs, batch, batch_idx: 1 / 0
    callback = SondeCallback(to=tmp_path / "run", strict=True)
    with pytest.raises(ZeroDivisionError):
        fit(failing, callback)
    (end,) = sonde.Run(callback.run).events("end")
    assert (end.data["how"], end.data["exception"]) == ("exception", "ZeroDivisionError: division by zero")
    assert not any(part._forward_hooks for part in failing.modules())


def test_an_exception_in_the_sanity_check_leaves_nothing_behind(tmp_path):
    failing = module()
    failing.on_validation_start = lambda: 1 / 0
    callback = SondeCallback(to=tmp_path / "run", strict=True)
    with pytest.raises(ZeroDivisionError):
        fit(failing, callback)
    assert [event.data["how"] for event in sonde.Run(callback.run).events("end")] == ["exception"]
    assert not any(part._forward_hooks for part in failing.modules())


def test_the_variables_of_a_training_step_are_not_kept_in_memory_during_backward(tmp_path):
    """What made the loss is known until the loss has been looked at, and no longer."""
    trained, born, alive = module(), [], []

    def training_step(batch, batch_idx):
        large = torch.ones(1000)
        born.append(weakref.ref(large))
        return trained.loss(batch) + 0.0 * large.sum()

    trained.training_step = training_step
    trained.head.weight.register_hook(lambda gradient: alive.append(born[-1]() is not None))
    callback = SondeCallback(to=tmp_path / "run", every=1, strict=True)
    fit(trained, callback, limit_train_batches=3, limit_val_batches=0)
    assert alive == [False] * 3


def test_a_resumed_training_that_stops_early_says_both(tmp_path):
    saving, stopping = module(), module()

    def save(outputs, batch, batch_idx):
        saving.trainer.save_checkpoint(tmp_path / f"at{saving.trainer.global_step}.ckpt")

    saving.on_train_batch_end = save
    fit(saving, max_steps=4, max_epochs=-1, limit_val_batches=0)
    callback = SondeCallback(to=tmp_path / "run", strict=True)

    def stop(outputs, batch, batch_idx):
        stopping.trainer.should_stop = stopping.trainer.global_step >= 6

    stopping.on_train_batch_end = stop
    import lightning.pytorch as pl

    with silenced():
        trainer = lightning_trainer(pl, max_epochs=1, callbacks=[callback], limit_val_batches=0)
        trainer.fit(stopping, loader(), ckpt_path=tmp_path / "at3.ckpt", weights_only=False)
    run = sonde.Run(callback.run)
    assert [event.data["resumed_at"] for event in run.events("integration")] == [3]
    assert [(event.data["framework_step"], event.data["stopped_early"]) for event in run.events("training_end")] == [(6, True)]


def test_the_other_name_of_the_package_gets_a_callback_of_its_own_class(tmp_path):
    pl = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed: pip install 'sonde[dev]'")
    callback = SondeCallback(to=tmp_path / "run", strict=True)
    assert isinstance(callback, pl.Callback)
    assert isinstance(callback, SondeCallback)
    with silenced():
        lightning_trainer(pl, callbacks=callback, limit_train_batches=4).fit(lightning_module(pl), loader())
    run = sonde.Run(callback.run)
    assert next(iter(run.events("start"))).data["package"] == "pytorch_lightning"
    assert len(list(run.steps())) == 4


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(integration, "NAMES", ("no_such_lightning.pytorch",))
    with pytest.raises(sonde.SondeError, match="pip install lightning"):
        SondeCallback()


def test_a_report_before_any_training_is_a_clear_error():
    with pytest.raises(sonde.SondeError, match="Train first"):
        SondeCallback().report()


def test_a_setting_that_does_not_exist_is_refused_when_the_callback_is_made():
    with pytest.raises(sonde.SondeError, match="every must be"):
        SondeCallback(every=0)
