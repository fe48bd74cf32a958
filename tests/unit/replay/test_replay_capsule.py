"""Replaying a capsule with a model finds the origin and restores the model."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from dataclasses import replace  # noqa: E402

from torch import nn  # noqa: E402

from sonde.errors import SondeError  # noqa: E402
from sonde.replay.capsule.create_capsule import load_capsule, save_capsule  # noqa: E402
from sonde.replay.capsule.replay_capsule_with_model import is_same_origin, replay  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(x)) + x.log().mean()


def divided(output, weight):
    return (output.mean(1) / weight).mean()


def saved(tmp_path, x, model=None, **rest):
    return load_capsule(
        save_capsule(tmp_path, **({"step": 3, "model": model or Net(), "args": (x,), "kwargs": {}, "rng": torch.get_rng_state()} | rest))
    )


def test_the_origin_is_found_with_another_model_of_the_same_structure(tmp_path):
    found = replay(saved(tmp_path, torch.tensor([[1.0, 2, 3, 4], [0, 1, 2, 3]])), Net())
    assert found is not None
    assert (found.operation, found.phase, found.how) == ("log", "forward", "replayed")
    assert found.text == "return self.head(self.norm(x)) + x.log().mean()"


def test_the_origin_is_found_in_a_loss_that_takes_inputs_by_name(tmp_path):
    capsule = saved(tmp_path, torch.ones(3, 4), loss_inputs={"weight": torch.tensor([1.0, 0, 1])})
    found = replay(capsule, Net(), divided)
    assert found is not None
    assert (found.operation, found.text) == ("div", "return (output.mean(1) / weight).mean()")
    assert replay(capsule, Net(), lambda output, other: divided(output, other)) is not None


def test_the_origin_is_found_in_backward(tmp_path):
    found = replay(saved(tmp_path, torch.ones(3, 4)), Net(), lambda output: (output * 0).sum(1).sqrt().sum())
    assert found is not None
    assert (found.operation, found.phase) == ("sqrt", "backward")


def test_without_a_loss_the_sum_of_the_outputs_is_used_and_noted(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1))
    found = replay(saved(tmp_path, torch.tensor([[1.0, 2, float("nan"), 4]]), model), nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1)))
    assert found is not None
    assert found.phase == "input"
    assert "there is no loss_fn: the sum of the model's outputs was used as the loss" in found.caveats


def test_a_finite_step_has_no_origin(tmp_path):
    assert replay(saved(tmp_path, torch.ones(3, 4)), Net(), lambda output: output.square().mean()) is None


def test_the_model_and_the_random_state_are_restored(tmp_path):
    capsule = saved(tmp_path, torch.zeros(3, 4))
    other = Net().eval()
    other.head.weight.grad = torch.ones(2, 4)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    state = torch.get_rng_state()
    assert replay(capsule, other) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert not any(module.training for module in other.modules())
    assert torch.equal(other.head.weight.grad, torch.ones(2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())


def test_dropout_draws_the_same_random_numbers(tmp_path):
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    capsule = saved(tmp_path, torch.ones(2, 4), model)
    expected = model(torch.ones(2, 4))
    outputs = []
    torch.manual_seed(99)
    replay(
        capsule, nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), lambda output: outputs.append(output.detach().clone()) or output.sum()
    )
    assert torch.equal(outputs[0], expected)


def test_the_states_of_all_generators_are_set(tmp_path):
    model = Net()
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    capsule = saved(tmp_path, torch.ones(3, 4), model, rng=states)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    outputs = []
    replay(capsule, Net(), lambda output: outputs.append((random.random(), np.random.rand(), torch.rand(1).item())) or output.sum())
    assert outputs == [expected]


@pytest.mark.parametrize(
    "rng",
    [
        torch.zeros(3), torch.zeros(5056, dtype=torch.uint8), {"python": (3, (1, 2), None)}, {"torch": 3}, [1],
        {"numpy": ("MT19937", np.zeros(624, np.uint32), 10**9, 0, 0.0)}, {"numpy": ()}, {"numpy": ("x", 1, "2")},
    ],
    ids=lambda rng: repr(rng)[:40],
)  # fmt: skip
def test_an_invalid_random_state_does_no_harm(tmp_path, rng):
    found = replay(saved(tmp_path, torch.zeros(3, 4), rng=rng), Net())
    assert found is not None
    assert found.operation == "log"


def test_weights_that_were_not_stored_are_noted(tmp_path):
    bytes_without_weights = torch.get_rng_state().nbytes + 100  # the batch and the buffers
    found = replay(saved(tmp_path, torch.zeros(3, 4), max_mb=bytes_without_weights / 2**20), Net())
    assert found is not None
    assert any("no values of" in caveat for caveat in found.caveats)


def test_a_model_that_does_not_match_is_refused_with_the_difference(tmp_path):
    capsule = saved(tmp_path, torch.ones(3, 4))
    wider = Net()
    wider.head = nn.Linear(4, 5)
    larger = Net()
    larger.more = nn.Linear(2, 2)
    smaller = Net()
    del smaller.head
    for model, message in (
        (nn.Linear(2, 2), "its class is Linear, the capsule's Net"),
        (wider, r"its parameter head.weight is \[5, 4\], the capsule's \[2, 4\]"),
        (larger, "it has a parameter more.weight, more.bias that the capsule does not have"),
        (smaller, "it has no parameter head.weight, head.bias"),
        (len, "must be a torch.nn.Module"),
    ):
        with pytest.raises(SondeError, match=message):
            replay(capsule, model)


def test_a_loss_that_fails_raises_an_error_with_the_reason(tmp_path):
    capsule = saved(tmp_path, torch.ones(3, 4), loss_inputs={"y": torch.ones(7)})
    with pytest.raises(SondeError, match=r"failed on the inputs of .*: RuntimeError"):
        replay(capsule, Net(), lambda output, y: (output - y).sum())
    with pytest.raises(SondeError, match=r"is called with \(output, y\)"):
        replay(capsule, Net(), lambda output: output.sum())


def test_origins_are_the_same_if_lines_moved_or_a_submodule_was_called(tmp_path):
    found = replay(saved(tmp_path, torch.zeros(3, 4)), Net())
    assert found is not None
    assert is_same_origin(found, replace(found, source="other.py:1"))
    assert is_same_origin(replace(found, module="net.head"), replace(found, module="head"))
    assert not is_same_origin(replace(found, module="net.head"), replace(found, module="body"))
    assert not is_same_origin(found, replace(found, operation="sqrt"))
    assert not is_same_origin(found, replace(found, source="other.py:1", text="other"))
    assert not is_same_origin(found, None)
    assert is_same_origin(None, None)
