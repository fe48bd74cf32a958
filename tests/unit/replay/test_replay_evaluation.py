"""A NaN in an evaluation output is traced to its operation, an intended Inf is not reported, and nothing changes."""

import hashlib

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde import DebugConfig, Origin, Run, diagnose  # noqa: E402


class Scaled(nn.Module):
    """Divides by the norm of a row, which is 0 for a row of zeros; has every kind of state that a replay could change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))
        self.calls = []

    def forward(self, x):
        self.calls.append(len(x))
        self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.head(self.drop(self.norm(x / x.norm(dim=1, keepdim=True)))) + torch.rand(())


def step(model, optimizer):
    x = torch.randn(12, 4)
    optimizer.zero_grad()
    F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    optimizer.step()


def validation():
    x = torch.randn(16, 4)
    x[3] = x[10] = 0
    return x


WAYS = {
    "no_grad": lambda model, x: torch.no_grad()(model)(x),
    "inference_mode": lambda model, x: torch.inference_mode()(model)(x),
    "eval mode": lambda model, x: model(x),
}


def evaluate(model, way):
    model.eval()
    out = WAYS[way](model, validation())
    model.train()
    return out


def events(path, kind):
    return [event.data for event in Run(path).events(kind)]


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_in_evaluation_is_traced_and_the_training_is_bit_identical(way, tmp_path):
    def outcome(watched):
        torch.manual_seed(5)
        model = Scaled()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        session = sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) if watched else None
        outs = []
        for number in range(4):
            step(model, optimizer)
            if number > 0:
                outs.append(evaluate(model, way).detach().numpy().tobytes())
        if session is not None:
            session.close()
        numbers = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
        parts = (outs, numbers, model.calls, torch.get_rng_state().numpy().tobytes())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    assert outcome(True) == outcome(False)
    (data,) = events(tmp_path / "run", "origin")
    found = Origin.from_dict(data)
    assert (found.operation, found.key, found.samples, found.how) == ("div", "division-by-zero", (3, 10), "replayed")
    assert "x / x.norm(" in found.text
    assert data["what"] == "evaluation"
    assert {each["what"] for each in events(tmp_path / "run", "nonfinite")} == {"evaluation"}
    (finding,) = [one for one in diagnose(tmp_path / "run").findings if one.rule == "nonfinite-evaluation"]
    assert finding.cause.startswith("in evaluation, at step 2, div made the first NaN")


def trained(model, tmp_path, evaluation, **config):
    """A few steps of training, then an evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", config=DebugConfig(**config), strict=True):
        for _ in range(3):
            step(model, optimizer)
        model.eval()
        with torch.no_grad():
            return evaluation(model)


class Then(nn.Module):
    """A linear layer, and something done to its output in evaluation alone."""

    def __init__(self, after):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.after = after

    def forward(self, x):
        out = self.fc(x)
        return out if self.training else self.after(out)


@pytest.mark.parametrize(
    "after",
    [
        lambda out: out.masked_fill(out > 0, -torch.inf),
        lambda out: F.softmax(out * 1e4, 1).log(),
        lambda out: (out, torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)),
        lambda out: -torch.where(out > 0, out, torch.inf),
    ],
    ids=["masked logits", "log of a probability of 0", "a returned mask", "a literal infinity"],
)
def test_an_intended_infinity_is_not_reported(after, tmp_path):
    trained(Then(after), tmp_path, lambda model: [model(torch.randn(8, 4)) for _ in range(3)])
    assert not [*events(tmp_path / "run", "origin"), *events(tmp_path / "run", "origin_unknown"), *events(tmp_path / "run", "nonfinite")]
    assert "nonfinite-evaluation" not in [one.rule for one in diagnose(tmp_path / "run").findings]


def test_an_overflow_is_reported_although_it_is_not_nan(tmp_path):
    trained(Then(lambda out: (out.half() * 1000) ** 2 * 1000), tmp_path, lambda model: model(torch.randn(8, 4)))
    (data,) = events(tmp_path / "run", "origin")
    assert (data["key"], data["kind"]) == ("fp16-overflow", "inf")


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x).masked_fill(x[:, :1] > 1, torch.nan)


def test_a_nan_that_the_training_outputs_too_without_using_it_is_not_reported(tmp_path):
    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for _ in range(3):
            x = torch.randn(64, 4)
            used = x[:, 0] <= 1
            optimizer.zero_grad()
            F.cross_entropy(model(x)[used], (x[used, 1] > 0).long()).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(64, 4))
    assert not [*events(tmp_path / "run", "origin"), *events(tmp_path / "run", "nonfinite")]


class Ratio(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x) / (x[:, :1] > 0.5)


@pytest.mark.parametrize("in_training", [False, True])
def test_a_division_by_zero_is_reported_unless_the_training_outputs_it_too(in_training, tmp_path):
    model = Ratio()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for _ in range(3):
            x = torch.rand(64, 4) if in_training else torch.rand(64, 4) / 2 + 0.5
            optimizer.zero_grad()
            out = model(x)[x[:, 0] > 0.5]
            F.cross_entropy(out, (x[x[:, 0] > 0.5, 1] > 0.7).long()).backward()
            for p in model.parameters():
                p.grad.nan_to_num_()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.rand(64, 4))
    assert [data["key"] for data in events(tmp_path / "run", "origin")] == ([] if in_training else ["division-by-zero"])


def test_raise_mode_raises_at_the_call_of_the_model(tmp_path):
    with pytest.raises(sonde.NonFiniteError, match="put out in evaluation") as caught:
        trained(Then(lambda out: out / 0 * 0), tmp_path, lambda model: model(torch.randn(8, 4)), anomaly_detection_mode="raise")
    assert caught.value.origin.operation == "div"
    assert events(tmp_path / "run", "nonfinite")


def test_an_output_that_is_finite_in_the_replay_is_reported_without_an_origin(tmp_path):
    times = []

    def after(out):
        times.append(1)
        return out * torch.nan if len(times) == 1 else out

    trained(Then(after), tmp_path, lambda model: model(torch.randn(8, 4)))
    (unknown,) = events(tmp_path / "run", "origin_unknown")
    assert "finite" in unknown["reason"]
    (finding,) = [one for one in diagnose(tmp_path / "run").findings if one.rule == "nonfinite-evaluation"]
    assert "16 NaN among 16 numbers" in finding.cause
    assert "could not be found" in finding.cause


def test_after_a_non_finite_training_the_evaluation_is_not_replayed(tmp_path):
    model = Then(lambda out: out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) * 0).log().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))
    assert "nonfinite-evaluation" not in [one.rule for one in diagnose(tmp_path / "run").findings]
    assert len(events(tmp_path / "run", "origin")) == 1


def test_a_capsule_of_an_evaluation_is_replayed(tmp_path):
    pytest.importorskip("safetensors")
    from sonde.replay.capsule.create_capsule import load_capsule
    from sonde.replay.capsule.replay_capsule_with_model import is_same_origin, replay

    torch.manual_seed(1)
    trained(Scaled(), tmp_path, lambda model: model(validation()), save_debug_info=True)
    (data,) = events(tmp_path / "run", "origin")
    capsule = load_capsule(tmp_path / "run" / data["capsule"])
    assert not capsule.is_grad_enabled
    assert capsule.about == {"what": "evaluation", "bad": ""}
    assert is_same_origin(capsule.origin, replay(capsule, Scaled()))


SCRIPT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x) / x.norm(dim=1, keepdim=True)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).mean().backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    out = model(torch.{rows}(3, 4))
print("never in a replay")
"""


def test_a_capsule_of_an_evaluation_is_replayed_in_a_script_up_to_the_call_of_the_model(tmp_path, capsys):
    pytest.importorskip("safetensors")
    from sonde.replay.capsule.create_capsule import load_capsule
    from sonde.replay.capsule.replay_capsule_in_script import replay_script
    from sonde.replay.capsule.replay_capsule_with_model import is_same_origin

    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{rows}", "zeros"), encoding="utf-8")
    with sonde.DebugSession(DebugConfig(save_debug_info=True), to=tmp_path / "run", strict=True):
        exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), {"__name__": "__main__"})
    (data,) = events(tmp_path / "run", "origin")
    capsys.readouterr()
    script.write_text(SCRIPT.replace("{rows}", "ones"), encoding="utf-8")  # other data, as on another machine
    capsule = load_capsule(tmp_path / "run" / data["capsule"])
    assert is_same_origin(capsule.origin, replay_script(capsule, str(script)).origin)
    assert "never" not in capsys.readouterr().out
