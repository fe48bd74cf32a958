"""GradientFlowAnimator: every documented behavior, on plain gradients and on real models."""

from __future__ import annotations

import csv
import gc
import json
import math
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from sonde import GradientFlowAnimator, GradientHealth, SondeError  # noqa: E402
from sonde.tools.gradient_flow_animator import CSV_HEADER  # noqa: E402

pytestmark = pytest.mark.torch
NAN, INF = float("nan"), float("inf")


def recorded(*steps: dict, **settings) -> GradientFlowAnimator:
    animator = GradientFlowAnimator(**settings)
    for step, gradients in enumerate(steps):
        animator.record_step(step, gradients)
    return animator


def only(animator):
    (frame,) = animator.frames
    return {layer.name: layer for layer in frame.layers}


# ---- frames


def test_the_defaults_are_the_documented_ones():
    animator = GradientFlowAnimator()
    assert (animator.max_frames, animator.vanishing_threshold, animator.exploding_threshold) == (0, 1e-7, 1e3)


def test_a_frame_has_its_step_and_its_layers_sorted_by_name():
    animator = GradientFlowAnimator()
    animator.record_step(7, {"b": [1.0], "a": [1.0], "a10": [1.0], "a2": [1.0]})
    assert animator.frames[0].step == 7
    assert [layer.name for layer in animator.frames[0].layers] == ["a", "a10", "a2", "b"]


@pytest.mark.parametrize("make", [torch.tensor, np.array, list], ids=["tensor", "array", "list"])
def test_the_numbers_are_mean_and_largest_absolute_value_and_the_l2_norm(make):
    layer = only(recorded({"a": make([[3.0, -4.0], [0.0, 0.0]])}))["a"]
    assert (layer.mean_abs_grad, layer.max_abs_grad, layer.grad_norm) == (1.75, 4.0, 5.0)


def test_the_numbers_of_a_real_model_agree_with_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.randn(4, 3, 12, 12)).logsumexp(1).sum().backward()
    animator = GradientFlowAnimator()
    animator.record_model(0, model)
    found = only(animator)
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        exact = parameter.grad.double()
        assert found[name].mean_abs_grad == pytest.approx(exact.abs().mean().item(), rel=1e-5)
        assert found[name].max_abs_grad == pytest.approx(exact.abs().max().item(), rel=1e-5)
        assert found[name].grad_norm == pytest.approx(exact.norm().item(), rel=1e-5)


def test_a_layer_vanishes_where_its_mean_is_below_the_threshold_and_not_at_it():
    found = only(recorded({"at": [0.25], "below": [0.25 - 1e-9]}, vanishing_threshold=0.25))
    assert (found["at"].is_vanishing, found["below"].is_vanishing) == (False, True)


def test_a_layer_explodes_where_its_largest_is_above_the_threshold_and_not_at_it():
    found = only(recorded({"at": [0, -1000.0], "above": [0, -1000.5]}))
    assert (found["at"].is_exploding, found["above"].is_exploding) == (False, True)


def test_thresholds_can_be_set_fluently():
    animator = GradientFlowAnimator(max_frames=3).with_vanishing_threshold(0.5).with_exploding_threshold(2.0)
    animator.record_step(0, {"small": [0.4], "large": [2.5]})
    found = only(animator)
    assert found["small"].is_vanishing
    assert found["large"].is_exploding


def test_intensity_is_the_norm_over_the_largest_norm_of_the_frame():
    found = only(recorded({"a": [3.0, 4.0], "b": [10.0], "c": [0.0]}))
    assert [found[name].flow_intensity for name in "abc"] == [0.5, 1.0, 0.0]


def test_intensity_is_zero_where_the_largest_norm_is_zero():
    assert only(recorded({"a": [0.0, 0.0]}))["a"].flow_intensity == 0.0


@pytest.mark.parametrize("empty", [[], torch.zeros(0, 5), np.zeros((3, 0))], ids=["list", "tensor", "array"])
def test_an_empty_gradient_counts_as_zeros(empty):
    layer = only(recorded({"a": empty, "b": [1.0]}))["a"]
    assert (layer.mean_abs_grad, layer.max_abs_grad, layer.grad_norm, layer.flow_intensity) == (0, 0, 0, 0)
    assert layer.is_vanishing
    assert not layer.is_exploding


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_nonfinite_gradient_is_exploding_and_its_values_are_nonfinite(bad):
    layer = only(recorded({"a": [1.0, bad]}))["a"]
    assert layer.is_exploding
    assert not layer.is_vanishing
    assert layer.flow_intensity == 1.0
    for value in (layer.mean_abs_grad, layer.max_abs_grad, layer.grad_norm):
        assert math.isnan(value) if math.isnan(bad) else value == INF


def test_a_nonfinite_gradient_does_not_change_the_intensities_of_the_others():
    found = only(recorded({"bad": [INF, NAN, 1e30], "a": [4.0], "b": [1.0]}))
    assert [found[name].flow_intensity for name in ("bad", "a", "b")] == [1.0, 1.0, 0.25]


def test_zero_layers_beside_a_nonfinite_one_have_no_intensity():
    found = only(recorded({"bad": [NAN], "a": [0.0]}))
    assert found["a"].flow_intensity == 0.0


def test_intensities_stay_within_0_and_1_for_the_smallest_and_largest_floats():
    frame = recorded({"a": [5e-324], "b": [1e308] * 50, "c": [1e308]}).frames[0]
    assert all(0.0 <= layer.flow_intensity <= 1.0 for layer in frame.layers)


def test_frames_are_read_only():
    animator = recorded({"a": [1.0]})
    with pytest.raises(AttributeError):
        animator.frames = ()
    with pytest.raises(AttributeError):
        animator.frames[0].layers[0].grad_norm = 0.0
    assert isinstance(animator.frames, tuple)


# ---- the rolling window


def test_a_rolling_window_drops_the_oldest_frame_first():
    animator = recorded(*({"a": [float(i)]} for i in range(10)), max_frames=3)
    assert [frame.step for frame in animator.frames] == [7, 8, 9]


def test_without_a_limit_every_frame_is_stored():
    assert len(recorded(*({"a": [1.0]} for _ in range(2500))).frames) == 2500


def test_a_step_into_a_full_window_changes_no_other_frame():
    """A step takes O(1): the remaining frames are the same objects, and the deque does not move them."""
    animator = recorded(*({"a": [1.0]} for _ in range(1000)), max_frames=1000)
    before = animator.frames
    animator.record_step(1000, {"a": [1.0]})
    assert all(old is new for old, new in zip(before[1:], animator.frames))
    assert animator._frames.maxlen == 1000


def test_the_summary_counts_steps_that_have_left_the_window():
    summary = recorded(*({"a": [1.0]} for _ in range(10)), max_frames=2).summary_report()
    assert summary.total_steps == 10


# ---- recording


def test_gradients_are_not_kept_alive_and_not_changed():
    gradient = torch.randn(100, requires_grad=True)
    version, captured = gradient._version, weakref.ref(gradient)
    animator = recorded({"a": gradient})
    assert gradient._version == version
    del gradient
    gc.collect()
    assert captured() is None
    assert animator.frames


def test_parameters_without_a_gradient_are_missing_in_the_frame_of_a_model():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["used"](torch.ones(1, 2)).sum().backward()
    animator = GradientFlowAnimator()
    animator.record_model(0, model)
    assert sorted(only(animator)) == ["used.bias", "used.weight"]


def test_a_sparse_gradient_is_measured_as_a_whole():
    model = nn.Embedding(10, 4, sparse=True)
    model(torch.tensor([1, 1, 3])).sum().backward()
    animator = GradientFlowAnimator()
    animator.record_model(0, model)
    assert only(animator)["weight"].grad_norm == pytest.approx(model.weight.grad.to_dense().norm().item())
    assert only(animator)["weight"].mean_abs_grad == pytest.approx(12 / 40)


def test_a_layer_given_as_none_is_missing():
    assert sorted(only(recorded({"a": None, "b": [1.0]}))) == ["b"]


def test_bfloat16_and_integer_gradients_are_measured():
    found = only(recorded({"a": torch.tensor([3, 4], dtype=torch.bfloat16), "b": np.array([3, -4])}))
    assert found["a"].grad_norm == found["b"].grad_norm == 5.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: GradientFlowAnimator(max_frames=-1), "max_frames"),
        (lambda: GradientFlowAnimator(max_frames=2.5), "max_frames"),
        (lambda: GradientFlowAnimator(vanishing_threshold=-1e-7), "vanishing_threshold"),
        (lambda: GradientFlowAnimator(exploding_threshold=NAN), "exploding_threshold"),
        (lambda: GradientFlowAnimator().with_exploding_threshold("many"), "exploding_threshold"),
        (lambda: recorded([1.0]), "record_model"),
        (lambda: recorded({3: [1.0]}), "layer name is a string"),
        (lambda: recorded({"enc": "abc"}), "'enc'"),
        (lambda: recorded({"enc": [[1.0], [1.0, 2.0]]}), "'enc'"),
        (lambda: recorded({"enc": torch.zeros(3, device="meta")}), "'enc'"),
        (lambda: GradientFlowAnimator().record_step(-1, {}), "step"),
        (lambda: GradientFlowAnimator().record_step(0.5, {}), "step"),
        (lambda: GradientFlowAnimator().record_model(0, {"a": [1.0]}), "record_step"),
        (lambda: recorded({"a": [1.0]}).play(0), "fps"),
        (lambda: recorded({"a": [1.0]}).export_gif("x.gif", fps=-3), "fps"),
        (lambda: GradientFlowAnimator().export_gif("x.gif"), "nothing to animate"),
        (lambda: recorded({"a": [1.0]}).export_gif("x.png"), r"must end in \.gif"),
        (lambda: recorded({"a": [1.0]}).export_gif(None), "needs a path, not None"),
        (lambda: recorded({"a": [1.0]}).export_json(None), "needs a path, not None"),
        (lambda: recorded({"a": [1.0]}).export_csv(None), "needs a path, not None"),
        (lambda: GradientFlowAnimator(exploding_threshold=-1), r"For instance exploding_threshold=1000\."),
        (lambda: GradientFlowAnimator(vanishing_threshold=-1), r"For instance vanishing_threshold=1e-07\."),
    ],
)
def test_a_wrong_argument_raises_an_error_that_names_it(wrong, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SondeError, match=message):
        wrong()
    assert not list(tmp_path.iterdir())


def test_a_refused_step_leaves_no_frame():
    animator = GradientFlowAnimator()
    with pytest.raises(SondeError):
        animator.record_step(0, {"a": [1.0], "b": object()})
    assert animator.frames == ()


# ---- health


def frames_with(healthy: int, vanishing: int = 0, exploding: int = 0) -> GradientFlowAnimator:
    rows = [{"a": [1.0], "b": [1.0]}] * healthy + [{"a": [1e-9], "b": [1.0]}] * vanishing + [{"a": [1.0], "b": [1e6]}] * exploding
    return recorded(*rows)


@pytest.mark.parametrize(
    ("healthy", "vanishing", "exploding", "health"),
    [
        (10, 0, 0, GradientHealth.HEALTHY),
        (4, 0, 6, GradientHealth.CRITICAL),
        (5, 0, 5, GradientHealth.PROBLEMS_DETECTED),  # r = 0.5 is not above 0.5
        (99, 0, 1, GradientHealth.PROBLEMS_DETECTED),  # any explosion
        (6, 4, 0, GradientHealth.PROBLEMS_DETECTED),
        (7, 3, 0, GradientHealth.MINOR_ISSUES),  # r = 0.3 is not above 0.3
        (99, 1, 0, GradientHealth.MINOR_ISSUES),
        (0, 10, 0, GradientHealth.PROBLEMS_DETECTED),
        (4, 5, 1, GradientHealth.CRITICAL),  # frames with any issue count
    ],
)
def test_the_health_class_follows_from_explosions_and_the_share_of_frames_with_issues(healthy, vanishing, exploding, health):
    assert frames_with(healthy, vanishing, exploding).summary_report().overall_health is health


def test_without_frames_the_summary_has_zero_steps_and_a_recommendation_to_record():
    summary = GradientFlowAnimator().summary_report()
    assert (summary.total_steps, summary.layers_with_vanishing_grads, summary.layers_with_exploding_grads) == (0, (), ())
    assert "No gradient was recorded" in summary.recommendations[-1]


def test_total_steps_is_the_last_step_plus_one():
    animator = GradientFlowAnimator()
    animator.record_step(10, {"a": [1.0]})
    animator.record_step(41, {"a": [1.0]})
    assert animator.summary_report().total_steps == 42


def test_the_layers_with_issues_are_sorted_and_named_once():
    summary = recorded({"b": [1e-9], "a": [1e-9], "d": [NAN], "c": [1e9]}, {"b": [0.0], "c": [1.0], "d": [1e4]}).summary_report()
    assert summary.layers_with_vanishing_grads == ("a", "b")
    assert summary.layers_with_exploding_grads == ("c", "d")


def test_recommendations_for_vanishing_layers_name_them_and_the_remedies():
    text = "\n".join(frames_with(5, vanishing=5).summary_report().recommendations)
    for word in ("a", "residual", "normalization", "learning rate", "Xavier", "Kaiming"):
        assert word in text
    assert "clip" not in text.lower()


def test_recommendations_for_exploding_layers_clip_at_a_number_from_the_observed_norms():
    rows = [{"a": [0.3 + 0.01 * i], "b": [0.1]} for i in range(20)] + [{"a": [1e5], "b": [0.1]}]
    summary = recorded(*rows).summary_report()
    text = "\n".join(summary.recommendations)
    assert "in a:" in text
    assert "clip_grad_norm_(model.parameters(), 0.48)" in text  # nine tenths of hypot(0.30 … 0.49, 0.1) are below
    assert "learning rate" in text
    assert "optimizer" in text


@pytest.mark.parametrize(
    ("counts", "words"),
    [((1, 0, 9), "halt"), ((9, 0, 1), "depth"), ((9, 1, 0), "monitor"), ((9, 0, 0), "no action")],
)
def test_the_last_recommendation_is_for_the_class(counts, words):
    last = frames_with(*counts).summary_report().recommendations[-1]
    assert words in last
    if counts[0] == 9 and not any(counts[1:]):
        assert len(frames_with(*counts).summary_report().recommendations) == 1


# ---- printed


def test_frames_layers_and_summaries_print_as_short_aligned_texts():
    animator = recorded({"encoder.weight": [3.0, -4.0], "head": [NAN], "low": [1e-9], "high": [2e3]})
    frame = animator.frames[0]
    assert str(frame).splitlines() == [
        "step 0: 4 layers, total norm NaN",
        "layer            norm   mean  largest",
        "encoder.weight      5    3.5        4",
        "head              NaN    NaN      NaN  not finite",
        "high             2000   2000     2000  exploding",
        "low             1e-09  1e-09    1e-09  vanishing",
    ]
    assert str(frame.layers[0]) == "encoder.weight: norm 5, mean 3.5, largest 4"
    assert str(frame.layers[1]) == "head: norm NaN, mean NaN, largest NaN (not finite)"
    lines = str(animator.summary_report()).splitlines()
    assert lines[:3] == ["gradient flow: critical, 1 step", "vanishing: low", "exploding: head, high"]
    assert all(line.startswith("- ") for line in lines[3:])
    assert lines[-1].startswith("- Critical")
    assert str(GradientFlowAnimator().summary_report()).startswith("gradient flow: nothing recorded")


def test_the_records_are_public_under_their_names():
    import sonde

    animator = recorded({"a": [1.0]})
    assert isinstance(animator.frames[0], sonde.GradientFrame)
    assert isinstance(animator.frames[0].layers[0], sonde.LayerGradientInfo)
    assert isinstance(animator.summary_report(), sonde.GradientFlowSummary)
    assert isinstance(animator.summary_report().overall_health, sonde.GradientHealth)


def test_a_nan_gradient_is_named_without_advice_to_clip():
    lines = recorded({"a": [NAN], "b": [1.0]}).summary_report().recommendations
    assert lines[0].startswith("NaN or Inf in the gradients of a: clipping does not remove them.")
    assert "clip_grad_norm_" not in "".join(lines)


def test_clear_drops_the_frames():
    animator = recorded({"a": [1.0]})
    animator.clear()
    assert animator.frames == ()
    assert animator.summary_report().total_steps == 0


# ---- export


def test_csv_has_the_documented_header_and_numbers_with_8_decimals(tmp_path):
    path = recorded({"a": [3.0, -4.0], "b": [1e-9]}).export_csv(tmp_path / "new" / "folder" / "flow.csv")
    assert path.read_text() == (
        "step,layer,mean_abs_grad,max_abs_grad,grad_norm,is_vanishing,is_exploding\n"
        "0,a,3.50000000e+00,4.00000000e+00,5.00000000e+00,0,0\n"
        "0,b,1.00000000e-09,1.00000000e-09,1.00000000e-09,1,0\n"
    )


def test_csv_is_read_back_with_strange_names_and_nonfinite_numbers(tmp_path):
    names = ['a,b"c\nd', "head", "ü"]
    path = recorded({names[0]: [NAN], names[1]: [INF], names[2]: [2.0]}).export_csv(tmp_path / "flow.csv")
    with open(path, newline="", encoding="utf-8") as file:
        rows = {row["layer"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(names)
    assert math.isnan(float(rows[names[0]]["grad_norm"]))
    assert float(rows[names[1]]["max_abs_grad"]) == INF
    assert rows[names[0]]["is_exploding"] == rows[names[1]]["is_exploding"] == "1"


@pytest.mark.parametrize("name", ["=1+1", '=HYPERLINK("http://x","y")', "+1", "-1", "@SUM(A1)", "\t=1"])
def test_a_name_that_a_spreadsheet_would_run_as_a_formula_gets_an_apostrophe(tmp_path, name):
    path = recorded({name: [1.0]}).export_csv(tmp_path / "flow.csv")
    with open(path, newline="", encoding="utf-8") as file:
        assert list(csv.reader(file))[1][1] == f"'{name}"


def test_csv_of_nothing_is_the_header(tmp_path):
    assert GradientFlowAnimator().export_csv(tmp_path / "f.csv").read_text() == ",".join(CSV_HEADER) + "\n"


def strict_json(text: str):
    def refuse(word: str):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_the_list_of_frames_and_strict(tmp_path):
    animator = recorded({"a": [3.0, -4.0], "b": [NAN]}, {"a": [-INF]})
    document = strict_json(animator.export_json(tmp_path / "deep" / "flow.json").read_text())
    first, second = document
    assert (first["step"], second["step"]) == (0, 1)
    a, b = first["layers"]
    assert a == {
        "name": "a", "mean_abs_grad": 3.5, "max_abs_grad": 4.0, "grad_norm": 5.0,
        "is_vanishing": False, "is_exploding": False, "flow_intensity": 1.0,
    }  # fmt: skip
    assert (b["grad_norm"], b["is_exploding"]) == ("NaN", True)
    assert second["layers"][0]["grad_norm"] == "Infinity"


def test_an_export_replaces_the_older_file_and_refuses_a_directory(tmp_path):
    animator = recorded({"a": [1.0]})
    for _ in range(2):
        animator.export_csv(tmp_path / "f.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["f.csv"]
    with pytest.raises(SondeError, match="directory"):
        animator.export_json(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SondeError, match="file"):
        animator.export_csv(tmp_path / "file" / "f.csv")


def test_a_deep_sigmoid_mlp_vanishes_and_a_healthy_one_does_not():
    def flow(activation: type[nn.Module]) -> GradientFlowAnimator:
        torch.manual_seed(0)
        model = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(32, 32), activation())), nn.Linear(32, 2))
        animator = GradientFlowAnimator()
        for step in range(5):
            model.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(64, 32)), torch.randint(2, (64,))).backward()
            animator.record_model(step, model)
        return animator

    assert "0.weight" in flow(nn.Sigmoid).summary_report().layers_with_vanishing_grads
    assert flow(nn.SELU).summary_report().overall_health is GradientHealth.HEALTHY
