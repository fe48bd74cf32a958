"""FLOPs equal hand counts for every layer, forward and backward. Times use the same trace, so this also proves the attribution of time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sonde.profiler import LayerCost  # noqa: E402
from sonde.profiler.profiler import Profiler  # noqa: E402

pytestmark = pytest.mark.torch
BATCH, WIDTH = 16, 64
PRODUCT = 2 * BATCH * WIDTH * WIDTH  # of a batch with a square matrix


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def layers(model: nn.Module, inputs: Any, **how: Any) -> dict[str, LayerCost]:
    report = Profiler().profile(model, inputs, warmup=1, repeats=1, **how)
    return {layer.path: layer for layer in report.layers}


def counts(model: nn.Module, inputs: Any, **how: Any) -> dict[str, tuple[int, int]]:
    return {path: (layer.flops_forward, layer.flops_backward) for path, layer in layers(model, inputs, **how).items()}


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def rows() -> Any:
    return torch.randn(BATCH, WIDTH)


def test_flops_of_an_mlp() -> None:
    found = counts(nn.Sequential(linear(), nn.ReLU(), nn.Linear(WIDTH, 10)), rows())
    last = 2 * BATCH * WIDTH * 10
    # The input of the first layer needs no gradient: one product instead of two.
    assert found == {"": (PRODUCT + last, PRODUCT + 2 * last), "0": (PRODUCT, PRODUCT), "1": (0, 0), "2": (last, 2 * last)}


@pytest.mark.parametrize("groups", [1, 4])
def test_flops_of_a_convolution(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=groups), nn.Conv2d(16, 4, 1))
    found = counts(model, torch.randn(2, 8, 10, 10))
    first, second = 2 * 2 * 16 * 25 * 8 * 9 // groups, 2 * 2 * 4 * 25 * 16
    assert found["0"] == (first, first)
    assert found["1"] == (second, 2 * second)


def test_flops_of_a_transposed_convolution() -> None:
    found = counts(nn.Sequential(nn.Conv1d(4, 4, 1), nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2)), torch.randn(2, 4, 10))
    forward = 2 * 2 * 10 * 4 * 3 * 3
    assert found["1"] == (forward, 2 * forward)


def test_flops_of_fused_attention_on_this_device() -> None:
    class Attention(nn.Module):
        def forward(self, query: Any, key: Any) -> Any:
            return functional.scaled_dot_product_attention(query, key, key)

    query, key = torch.randn(2, 4, 10, 16, requires_grad=True), torch.randn(2, 4, 6, 16, requires_grad=True)
    one = 2 * 2 * 4 * 10 * 6 * 16
    assert counts(Attention(), (query, key)) == {"": (2 * one, 5 * one)}  # the backward recomputes the scores


@pytest.mark.parametrize("with_weights", [False, True], ids=["fused", "by products"])
def test_flops_of_multihead_attention(with_weights: bool) -> None:
    x = torch.randn(2, 10, WIDTH)
    found = counts(nn.MultiheadAttention(WIDTH, 4, batch_first=True), {"query": x, "key": x, "value": x, "need_weights": with_weights})
    projection, one = 2 * 20 * WIDTH * WIDTH, 2 * 2 * 4 * 10 * 10 * 16
    assert found[""] == (4 * projection + 2 * one, 3 * projection + 2 * projection + (4 if with_weights else 5) * one)


def test_flops_of_the_fast_path_that_inference_takes() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True).eval()
    found = counts(layer, torch.randn(2, 10, WIDTH), backward=False)
    assert found == {"": (8 * 20 * WIDTH * WIDTH + 4 * 2 * 10 * 10 * WIDTH + 4 * 20 * WIDTH * 128, 0)}


def test_flops_of_an_lstm() -> None:
    found = counts(nn.LSTM(WIDTH, 32), torch.randn(5, BATCH, WIDTH))
    forward = 2 * 5 * BATCH * 4 * 32 * (WIDTH + 32)
    assert found[""] == (forward, 2 * forward)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = linear(), nn.Sequential(linear(), nn.ReLU(), linear()), linear()
        self.reentrant = reentrant

    def forward(self, x: Any) -> Any:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "by saved tensors"])
def test_recomputation_by_checkpointing_belongs_to_the_backward_of_its_layers(reentrant: bool) -> None:
    found = counts(Checkpointed(reentrant), rows())
    assert found["block.0"] == (PRODUCT, 3 * PRODUCT)
    # Non-reentrant checkpointing stops as soon as all saved tensors are recomputed: the last product is not repeated.
    assert found["block.2"] == (PRODUCT, 3 * PRODUCT if reentrant else 2 * PRODUCT)
    assert found["last"] == (PRODUCT, 2 * PRODUCT)
    assert found["block"][1] == found["block.0"][1] + found["block.2"][1]


def test_activations_that_checkpointing_discards_are_not_counted_as_memory() -> None:
    found = layers(Checkpointed(reentrant=False), rows())
    assert found["block.1"].memory_self_bytes == 0
    assert layers(nn.Sequential(linear(), nn.ReLU(), linear()), rows())["1"].memory_self_bytes == BATCH * WIDTH * 4


class Unusual(nn.Module):
    """Calls one layer twice, changes its result in place, computes a product itself, and returns a dict that also contains non-tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = linear(), nn.ReLU(inplace=True)

    def forward(self, x: Any) -> dict[str, Any]:
        hidden = self.layer(self.relu(self.layer(x)))
        hidden += 1
        return {"logits": hidden @ self.layer.weight, "name": "unusual", "parts": (hidden, None)}


def test_a_layer_that_is_called_twice_counts_twice_and_the_product_of_a_parent_is_its_own() -> None:
    found = layers(Unusual(), rows())
    assert found["layer"].calls == 2
    assert (found["layer"].flops_forward, found["layer"].flops_backward) == (2 * PRODUCT, 3 * PRODUCT)
    assert found[""].flops_self == 3 * PRODUCT
    assert found[""].flops_forward + found[""].flops_backward == 8 * PRODUCT


def test_a_module_that_calls_itself_is_counted_once_from_outside() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Any, times: int = 2) -> Any:
            return self(self.layer(x), times - 1) if times else self.layer(x)

    found = layers(Recursive(), rows())
    assert (found[""].calls, found["layer"].calls) == (3, 3)
    assert found[""].flops_forward == found["layer"].flops_forward == 3 * PRODUCT


def test_a_frozen_part_has_no_products_for_its_weights() -> None:
    model = nn.Sequential(linear(), linear().requires_grad_(False), linear())
    assert counts(model, rows())["1"] == (PRODUCT, PRODUCT)


def test_torchs_own_counter_agrees_where_it_has_formulas() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = nn.Sequential(nn.Conv1d(WIDTH, 32, 3), nn.GELU(), nn.Flatten(), nn.Linear(32 * 8, 5)), torch.randn(4, WIDTH, 10)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    model.zero_grad()
    assert Profiler().profile(model, x, warmup=1, repeats=1).flops_per_step == counter.get_total_flops()
