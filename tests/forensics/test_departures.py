"""Where an odd sample becomes odd."""

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch import nn  # noqa: E402

from sonde.replay.sample_deviation import Layers, sizes_of, turning_point  # noqa: E402


def test_sizes_are_the_mean_absolute_values_of_the_samples_wherever_the_batch_lies():
    x = torch.tensor([[1.0, -3.0], [0.0, 0.0], [4.0, 4.0]])
    assert sizes_of("x", x, 3).of_samples == (2.0, 0.0, 4.0)
    assert sizes_of("x", x.T, 3).of_samples == (2.0, 0.0, 4.0)
    assert sizes_of("x", x, 5) is None
    assert sizes_of("x", x.long(), 3) is None


def test_numbers_that_would_overflow_when_squared_have_a_size():
    assert sizes_of("x", torch.full((2, 4), 1e30), 2).of_samples == pytest.approx((1e30, 1e30))
    assert sizes_of("x", torch.full((2, 4), 6e4, dtype=torch.float16), 2).of_samples == pytest.approx((6e4, 6e4), rel=1e-3)


def test_the_layer_where_a_sample_leaves_the_others_is_named():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.where(x[:, :1] > 5, x * 1000, x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Odd(), nn.ReLU())
    x = torch.rand(8, 4)
    x[3, 0] = 6.0
    with Layers({"": model}, 8) as layers:
        model(x)
    assert [sizes.name for sizes in layers.outputs] == ["0", "1", "2"]
    path, mine, others = turning_point(layers.outputs, (3,), 10.0)
    assert path == "1"
    assert mine > 1000 * others
    assert not any(module._forward_hooks for module in model.modules())


def test_samples_that_are_like_the_others_have_no_turning_point():
    model = nn.Linear(4, 4)
    with Layers({"net": model}, 6) as layers:
        model(torch.ones(6, 4))
    assert layers.outputs[0].name == "net"
    assert turning_point(layers.outputs, (2,), 4.0) is None


def test_a_sample_that_is_far_smaller_than_the_others_is_odd_too():
    table = nn.Embedding(10, 4)
    with torch.no_grad():
        table.weight[7] *= 1e-7
    with Layers({"": nn.Sequential(table)}, 5) as layers:
        table(torch.tensor([0, 1, 7, 3, 4]))
    path, mine, others = turning_point(layers.outputs, (2,), 4.0)
    assert path == "0"
    assert mine < 1e-5 * others
