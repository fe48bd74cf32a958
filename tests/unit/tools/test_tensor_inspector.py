"""TensorInspector: stored inspections, comparison, memory and leaks; it keeps no tensor alive."""

from __future__ import annotations

import gc
import json
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.errors import SondeError  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(name="inspector")
def new_inspector() -> sonde.TensorInspector:
    return sonde.TensorInspector()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def test_an_inspection_is_found_by_its_id_with_layer_and_statistics(inspector):
    model = nn.Linear(4, 3)
    output = model(noise(5, 4))
    tensor_id = inspector.inspect_tensor(output, "logits", layer="head", operation="linear", step=7)
    info = inspector.get_tensor_info(tensor_id)
    assert (info.name, info.layer, info.operation, info.step) == ("logits", "head", "linear", 7)
    assert info.stats.mean == pytest.approx(output.double().mean().item(), rel=1e-5)
    assert (info.stats.shape, info.stats.dtype, info.stats.device, info.stats.num_bytes) == ((5, 3), "float32", "cpu", 60)
    assert output.grad_fn is not None
    assert "head" in str(info)
    assert "<table" in info._repr_html_()


def test_arrays_and_lists_are_inspected(inspector):
    assert inspector.get_tensor_info(inspector.inspect_tensor(np.arange(4), "array")).stats.mean == 1.5
    assert inspector.get_tensor_info(inspector.inspect_tensor([1, 2, 6], "list")).stats.max == 6


def test_an_inspected_tensor_is_not_kept_alive(inspector):
    tensor = noise(10).requires_grad_() * 2
    alive = weakref.ref(tensor)
    info = inspector.get_tensor_info(inspector.inspect_tensor(tensor, "x"))
    assert info.is_alive
    assert info.value is tensor
    del tensor
    assert alive() is None
    assert not info.is_alive


def test_the_oldest_inspection_is_dropped_first_and_the_error_says_so():
    inspector = sonde.TensorInspector(max_tracked_tensors=3)
    ids = [inspector.inspect_tensor([i], "x", step=i) for i in range(5)]
    assert [info.step for info in inspector.history("x")] == [2, 3, 4]
    with pytest.raises(SondeError, match=r"'x#1' is no longer stored.*\n.*max_tracked_tensors=6"):
        inspector.get_tensor_info(ids[0])


def test_an_unknown_id_or_name_is_answered_with_the_nearest(inspector):
    inspector.inspect_tensor([1.0], "loss")
    with pytest.raises(SondeError, match="Nearest: loss#1"):
        inspector.get_tensor_info("los#1")
    with pytest.raises(SondeError, match="Nearest: loss"):
        inspector.history("lost")


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "many"])
def test_an_impossible_limit_is_refused(wrong):
    with pytest.raises(SondeError, match="max_tracked_tensors"):
        sonde.TensorInspector(max_tracked_tensors=wrong)


def test_a_tensor_without_a_name_is_refused(inspector):
    with pytest.raises(SondeError, match="needs a name"):
        inspector.inspect_tensor([1], "")


def test_two_tensors_are_compared_by_value(inspector):
    a = noise(30, 40)
    b = a.clone()
    b[3, 5] += 0.5
    b[7, 0] = 0.0
    found = inspector.compare(a, b)
    x, y = a.double().numpy(), b.double().numpy()
    assert found.basis == "values"
    assert found.max_abs_difference == pytest.approx(np.abs(x - y).max(), rel=1e-5)
    assert found.max_rel_difference == pytest.approx(1.0)
    assert found.cosine == pytest.approx((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()), rel=1e-9)
    assert found.distribution_distance == pytest.approx(np.abs(np.sort(x.ravel()) - np.sort(y.ravel())).mean(), rel=1e-5)
    assert (found.num_different, found.num_pairs) == (2, 1200)
    assert found.first_difference == (3, 5)
    assert found.first_values == (a[3, 5].item(), b[3, 5].item())
    assert found.are_equal is False
    assert "[3, 5]" in str(found)


def test_equal_tensors_with_nan_are_equal(inspector):
    x = noise(10)
    x[3] = math.nan
    found = inspector.compare(x, x.clone())
    assert found.are_equal is True
    assert found.num_bad_pairs == 1
    assert found.first_difference is None


def test_a_nonfinite_value_differs_from_a_finite_one(inspector):
    found = inspector.compare([1.0, math.inf, 2.0], [1.0, 5.0, 2.0])
    assert (found.num_different, found.first_difference, found.max_abs_difference) == (1, (1,), 0.0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "float64", "int8", "uint16", "uint64", "bool", "complex64"])
def test_every_dtype_is_compared(inspector, dtype):
    a = torch.tensor([0.0, 1.0, 2.0, 3.0]).to(getattr(torch, dtype))
    b = torch.tensor([0.0, 1.0, 0.0, 3.0]).to(getattr(torch, dtype))
    found = inspector.compare(a, b)
    assert found.first_difference == (2,)
    assert found.max_abs_difference == (1.0 if dtype == "bool" else 2.0)


def test_integers_too_large_for_float64_are_distinguished(inspector):
    assert inspector.compare(torch.tensor([2**60]), torch.tensor([2**60 + 1])).num_different == 1


def test_numbers_at_the_end_of_float64_are_compared(inspector):
    found = inspector.compare([1e308, -1e308], [1e308, 1e308])
    assert found.max_rel_difference == 2.0
    assert found.cosine == 0.0


def test_sparse_tensors_are_compared_with_dense_ones(inspector):
    dense = noise(5, 5) * (noise(5, 5, seed=1) > 0)
    assert inspector.compare(dense.to_sparse(), dense).are_equal


def test_different_shapes_are_compared_by_their_distributions(inspector):
    found = inspector.compare(torch.zeros(10), torch.ones(3, 4))
    assert found.distribution_distance == 1.0
    assert found.are_equal is None
    assert "[10] and [3, 4]" in found.note


def test_ids_of_living_unchanged_tensors_are_compared_by_value(inspector):
    a, b = noise(10), noise(10, seed=1)
    first, second = inspector.inspect_tensor(a, "x"), inspector.inspect_tensor(b, "x")
    assert inspector.compare(first, second).max_abs_difference == pytest.approx((a - b).abs().max().item())


def test_ids_of_freed_tensors_are_compared_by_statistics_with_a_note(inspector):
    first = inspector.inspect_tensor(noise(1000), "x")
    second = inspector.inspect_tensor(noise(1000) + 2, "x")
    found = inspector.compare(first, second)
    assert found.basis == "statistics"
    assert found.distribution_distance == pytest.approx(2.0, rel=0.02)
    assert math.isnan(found.max_abs_difference)
    assert found.are_equal is None
    assert found.note.startswith("x#1 is gone and x#2 is gone.")


CHANGES = {"op": lambda x: x.add_(1), "data": lambda x: x.data.add_(1), "memory": lambda x: x.numpy().fill(3)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_was_changed_in_place_is_not_compared_by_value(inspector, change):
    tensor = noise(100)
    first = inspector.inspect_tensor(tensor, "x")
    CHANGES[change](tensor)
    found = inspector.compare(first, tensor)
    assert found.basis == "statistics"
    assert "x#1 was changed since" in found.note


def test_memory_counts_a_shared_storage_once(inspector):
    base = torch.zeros(1000)
    views = [base[:10], base[500:], base.view(10, 100)]
    for number, view in enumerate(views):
        inspector.inspect_tensor(view, f"view{number}")
    inspector.inspect_tensor(base, "base")
    inspector.inspect_tensor(torch.zeros(77), "gone")
    memory = inspector.memory()
    assert (memory.num_alive, memory.num_bytes) == (4, 4000)
    assert memory.by_name == {"view0": 4000, "view1": 4000, "view2": 4000, "base": 4000}
    assert inspector.history("view0")[0].stats.num_bytes == 40
    assert inspector.history("view0")[0].storage_bytes == 4000


def test_a_leak_of_inspected_tensors_names_its_owner(inspector):
    def train():
        model = nn.Linear(4, 1)
        history = []
        for step in range(20):
            loss = model(noise(8, 4)).pow(2).mean()
            inspector.inspect_tensor(loss, "loss", step=step)
            inspector.inspect_tensor(model.weight, "weight", step=step)
            history.append(loss)
        return inspector.leaks()

    (leak,) = train()
    assert leak.holder.startswith("train() local 'history' -> list[")
    assert leak.holder.endswith("-> loss")
    assert leak.num_tensors == 18


def test_freed_tensors_are_not_a_leak(inspector):
    model = nn.Linear(4, 1)
    for _ in range(20):
        loss = model(noise(8, 4)).pow(2).mean()
        inspector.inspect_tensor(loss, "loss")
        inspector.inspect_tensor(model.weight, "weight")
    assert inspector.leaks() == []


def test_the_holders_of_an_inspected_tensor_are_named(inspector):
    stored = [noise(3)]
    tensor_id = inspector.inspect_tensor(stored[0], "x")
    (first, *_) = (str(chain) for chain in inspector.holders(tensor_id))
    assert first.endswith("local 'stored' -> list[0] -> x")
    stored.clear()
    gc.collect()
    assert inspector.holders(tensor_id) == []


def test_the_export_is_strict_json(inspector):
    info = inspector.get_tensor_info(inspector.inspect_tensor([1.0, math.nan, math.inf], "x"))
    document = json.loads(info.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert document["stats"]["num_nan"] == 1
    all_bad = inspector.get_tensor_info(inspector.inspect_tensor([math.nan], "y"))
    assert json.loads(all_bad.to_json())["stats"]["mean"] == "NaN"


def test_a_tensor_that_cannot_be_measured_has_a_reason(inspector):
    info = inspector.get_tensor_info(inspector.inspect_tensor(torch.empty(3, device="meta"), "x"))
    assert "meta tensors hold no values" in str(info)
    with pytest.raises(SondeError, match="meta tensors hold no values"):
        inspector.compare(torch.empty(3, device="meta"), [1, 2, 3])


def test_the_statistics_print_as_a_short_aligned_text(inspector):
    info = inspector.get_tensor_info(inspector.inspect_tensor(torch.arange(12.0).reshape(3, 4), "x"))
    assert str(info.stats).splitlines() == [
        "float32 [3, 4] on cpu, 48 bytes",
        "mean ± std   5.5 ± 3.45",
        "min … max    0 … 11",
        "L1, L2 norm  66, 22.5",
        "zeros        1 of 12 (8.3 %)",
        "NaN, Inf     0, 0",
        "extreme      0",
        "percentiles  1: 0.11, 5: 0.55, 25: 2.75, 50: 5.5, 75: 8.25, 95: 10.4, 99: 10.9",
        "outliers     0",
        f"histogram    │{''.join('█' if pair.sum() else ' ' for pair in info.stats.histogram.counts.reshape(-1, 2))}│",
    ]
    assert "<table" in info.stats._repr_html_()


def test_a_histogram_in_one_line_begins_at_zero(inspector):
    """Counts of 90 to 110 are bars of nearly the same height; before, the smallest of them had none."""
    values = np.concatenate([np.full(90 + at % 20, float(at)) for at in range(32)])
    line = str(inspector.get_tensor_info(inspector.inspect_tensor(values, "x")).stats).splitlines()[-1]
    assert set(line.split("│")[1]) <= set("▇█")


def test_masked_elements_are_not_taken_for_numbers(inspector):
    value = np.ma.masked_array([1.0, 2.0, 1e9], mask=[0, 0, 1])
    with pytest.raises(SondeError, match=r"1 of 3 elements are masked.*\n.*values.compressed\(\)"):
        inspector.inspect_tensor(value, "x")
    inspector.inspect_tensor(np.ma.masked_array([1.0, 2.0], mask=[0, 0]), "nothing masked")
    assert inspector.get_tensor_info(inspector.inspect_tensor(value.compressed(), "x")).stats.max == 2.0


def test_the_error_for_what_is_no_tensor_names_what_to_pass(inspector):
    with pytest.raises(SondeError, match="A gradient is None before backward"):
        inspector.inspect_tensor(nn.Linear(2, 2).weight.grad, "x")
    with pytest.raises(SondeError, match=r"Pass a part of it: value\['logits'\]"):
        inspector.inspect_tensor({"loss": 1.0, "logits": torch.ones(2)}, "x")
    with pytest.raises(SondeError, match=r"Pass a part of it: value\.logits"):
        inspector.inspect_tensor(SimpleNamespace(logits=torch.ones(2)), "x")
    with pytest.raises(SondeError) as error:
        inspector.inspect_tensor(object(), "x")
    assert "logits" not in str(error.value)


def test_clear_drops_all_inspections(inspector):
    tensor_id = inspector.inspect_tensor([1.0], "x")
    inspector.clear()
    assert inspector.names() == []
    with pytest.raises(SondeError, match="There are none"):
        inspector.get_tensor_info(tensor_id)


def test_control_characters_in_a_name_are_escaped(inspector):
    info = inspector.get_tensor_info(inspector.inspect_tensor([1.0], "\x1b[31mred<i>"))
    assert "\x1b" not in str(info)
    assert "<i>" not in info._repr_html_()


def test_the_plot_of_a_history_shows_every_step_and_marks_nonfinite_ones(inspector, tmp_path):
    pytest.importorskip("matplotlib")
    for step in range(8):
        inspector.inspect_tensor(noise(100) * math.exp(step) if step != 5 else [math.nan], "hidden", step=10 * step)
    plot = inspector.plot("hidden", tmp_path / "new" / "hidden.png")
    assert (tmp_path / "new" / "hidden.png").stat().st_size > 1000
    assert plot.data["steps"] == [10.0 * step for step in range(8)]
    assert plot.data["num_bad"][5] == 1
    assert math.isnan(plot.data["levels"]["50"][5])
