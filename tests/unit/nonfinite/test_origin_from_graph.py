"""The origin is read from the tensors that autograd saved if the step cannot be replayed."""

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import sonde  # noqa: E402
from sonde import Origin, Run  # noqa: E402
from sonde.nonfinite.origin_from_graph import origin_in_graph  # noqa: E402

INF = float("inf")


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "operation", "phase", "key"),
    [
        (lambda: torch.log(ones(3) * 0).sum(), "log", "forward", "log-of-zero"),
        (lambda: (ones(3) / torch.tensor([1.0, 0.0, 1.0])).sum(), "div", "forward", "division-by-zero"),
        (lambda: ((ones(3) * 1e3) ** 20).sum(), "pow", "forward", "overflow"),
        (lambda: (ones(3) * 1e30 * (ones(3) * 1e30)).sum(), "mul", "forward", "overflow"),
        (lambda: ((ones(2, 3) * 1e30) @ (ones(3, 2) * 1e30)).sum(), "mm", "forward", "overflow"),
        (lambda: (ones(3) * torch.tensor([1.0, INF, 1.0])).sum(), "mul", "input", "nan-input"),
        (lambda: F.mse_loss(ones(3), torch.tensor([0.0, float("nan"), 0.0])), "mseloss", "input", "nan-input"),
        # the Inf of the mask is intentional, that of the division is not
        (
            lambda: torch.logsumexp(ones(3) + torch.tensor([0.0, -INF, 0.0]), 0) / (ones(1) * 0).sum(),
            "div", "forward", "division-by-zero",
        ),
    ],
    ids=["log", "division", "power", "product", "matrix product", "Inf input", "NaN input", "after a mask"],
)  # fmt: skip
def test_the_earliest_operation_that_is_known_to_fail_is_named(loss, operation, phase, key):
    found = origin_in_graph(loss())
    assert (found.operation, found.phase, found.key, found.how) == (operation, phase, key, "graph")


def test_a_loss_without_a_cause_in_its_graph_has_no_origin():
    assert origin_in_graph(ones(3).sum() + INF) is None


def test_a_step_that_cannot_be_replayed_is_explained_from_the_graph_with_the_reason(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def losses():  # the generator has advanced when its value is found non-finite
        yield (model(torch.ones(2, 4)).exp() * 1e30 * (model(torch.ones(2, 4)).exp() * 1e30)).mean()

    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for loss in losses():
            loss.backward()
            optimizer.step()
    (event,) = Run(tmp_path / "run").events("origin")
    found = Origin.from_dict(event.data)
    assert (found.operation, found.key, found.how) == ("mul", "overflow", "graph")
    assert any("the operation that made it so did not run again" in note for note in found.caveats)
