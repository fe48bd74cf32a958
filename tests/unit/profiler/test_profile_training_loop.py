"""Steps of a script's training loop are found and measured; the training stays identical bit by bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from sonde.capture.training_callbacks import subscribers  # noqa: E402
from sonde.errors import SondeError  # noqa: E402
from sonde.profiler.profile_training_loop import StepWatcher, watch_steps  # noqa: E402

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        hidden = checkpoint(self.encoder, x, use_reentrant=False)
        return self.head(self.rnn(hidden.transpose(1, 2))[0][:, -1])


def train(num_steps: int, each: Callable[[nn.Module], None] = lambda net: None, accumulate: int = 1) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    data = DataLoader(TensorDataset(torch.randn(8 * num_steps * accumulate, 3, 9), torch.randint(2, (8 * num_steps * accumulate,))), 8)
    for number, (x, y) in enumerate(data):
        nn.functional.cross_entropy(net(x), y).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            each(net)
    return net


@pytest.fixture(scope="module")
def watched() -> tuple[StepWatcher, nn.Module]:
    with watch_steps(num_steps=4, warmup=2) as watcher:
        net = train(20)
    return watcher, net


def test_the_model_and_its_layers_are_found(watched: tuple[StepWatcher, nn.Module]) -> None:
    report = watched[0].report("train.py")
    assert watched[0].done
    assert [layer.path for layer in report.layers] == ["", "encoder", *(f"encoder.{i}" for i in range(4)), "rnn", "head"]
    assert report.title == "train.py"
    assert all(layer.forward.num == 4 and layer.calls == 1 for layer in report.layers)  # too few steps to leave any out
    assert report.layer("rnn").backward.median_ms > 0
    assert report.layer("").source.startswith("test_profile_training_loop.py:")


def test_phases_and_the_batch_are_in_the_report(watched: tuple[StepWatcher, nn.Module]) -> None:
    report = watched[0].report()
    assert set(report.phases) == {"data", "forward", "backward", "optimizer", "other"}
    assert (report.num_samples, report.batch) == (8, "float32 [8, 3, 9]")
    assert report.layer("head").flops_forward == 2 * 8 * 8 * 2
    assert report.layer("encoder.0").flops_backward == 2 * report.layer("encoder.0").flops_forward  # one is the recomputation


def test_a_step_of_a_gan_ends_with_the_last_of_its_optimizers() -> None:
    maker, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    with watch_steps([maker, critic], num_steps=2, warmup=2) as watcher:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (maker, critic)]
        for _ in range(12):
            made = maker(torch.randn(8, 4))
            for optimizer, judged in ((optimizers[1], made.detach()), (optimizers[0], made)):
                optimizer.zero_grad()
                critic(judged).mean().backward()
                optimizer.step()
    report = watcher.report()
    assert report.layer("linear0").backward.median_ms > 0  # in the same step as its forward
    assert report.layer("linear1").calls == 2
    assert (report.num_samples, report.batch) == (8, "float32 [8, 4]")  # the critic receives as many twice


def test_training_is_bit_identical(watched: tuple[StepWatcher, nn.Module]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(watched[1].state_dict().values(), train(20).state_dict().values()))


def test_all_hooks_are_removed(watched: tuple[StepWatcher, nn.Module]) -> None:
    net = watched[1]
    assert all("forward" not in module.__dict__ and not module._forward_hooks for module in net.modules())
    assert watched[0] not in subscribers()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_validation_between_steps_is_not_part_of_the_layers() -> None:
    def validate(net: nn.Module) -> None:
        with torch.no_grad():
            net(torch.zeros(4, 3, 9))

    with watch_steps(num_steps=2, warmup=1) as watcher:
        train(12, validate)
    assert watcher.report().layer("head").calls == 1


def test_accumulated_batches_are_one_step() -> None:
    with watch_steps(num_steps=2, warmup=1) as watcher:
        train(10, accumulate=3)
    report = watcher.report()
    assert (report.layer("head").calls, report.num_samples) == (3, 24)
    assert report.batch == "3 x float32 [8, 3, 9]"


def test_a_copy_made_in_a_measured_step_is_a_plain_model() -> None:
    copies: list[nn.Module] = []
    with watch_steps(num_steps=2, warmup=1) as watcher:
        net = train(12, lambda net: copies.append(copy.deepcopy(net)))
    assert watcher.done
    x = torch.zeros(2, 3, 9)
    for copied in copies:
        assert str(inspect.signature(copied.forward)) == str(inspect.signature(net.forward))
        copied(x)


def test_two_models_are_distinguished_by_their_variable_names() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    first, second = torch.optim.SGD(generator.parameters(), lr=0.01), torch.optim.SGD(critic.parameters(), lr=0.01)
    with watch_steps(num_steps=2, warmup=2) as watcher:
        for _ in range(14):
            second.zero_grad()
            critic(generator(torch.ones(4, 2)).detach()).mean().backward()
            second.step()
            first.zero_grad()
            (-critic(generator(torch.ones(4, 2))).mean()).backward()
            first.step()
    found = {layer.path: layer.calls for layer in watcher.report().layers}
    assert found == {"generator": 2, "critic": 2}


def test_an_exception_of_on_done_reaches_the_training() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with pytest.raises(Stop), watch_steps(num_steps=2, warmup=1, on_done=stop) as watcher:
        train(100)
    assert watcher.num_finished == 1 + 3 + 4
    assert watcher.report().step.num == 2


def test_a_training_that_raises_keeps_what_was_measured() -> None:
    def fail(net: nn.Module) -> None:
        if watcher.num_finished == 9:
            raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"), watch_steps(num_steps=10, warmup=1) as watcher:
        train(30, fail)
    report = watcher.report()
    assert report.notes[0] == "the training ended after 2 of 10 steps to be timed"


def test_a_script_that_does_not_train_gets_an_explanation() -> None:
    with watch_steps() as watcher:
        nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(SondeError, match="no training step was found"):
        watcher.report()


def test_a_script_that_ends_too_early_gets_an_explanation() -> None:
    with watch_steps() as watcher:
        train(4)
    with pytest.raises(SondeError, match="ended after 4 steps, too few"):
        watcher.report()
