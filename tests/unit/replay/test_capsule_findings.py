"""A capsule holds the findings of the run up to its step, and `sonde replay` prints them."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde import DebugConfig, Run, SondeError  # noqa: E402
from sonde.cli.replay import replay  # noqa: E402
from sonde.replay.capsule.create_capsule import load_capsule, save_capsule  # noqa: E402

FINDING = {"rule": "lr-zero", "severity": "error", "where": "", "step": 3, "cause": "it is 0", "fix": "raise it", "evidence": {"lr": 0}}


@pytest.fixture(scope="module")
def capsule(tmp_path_factory):
    """A capsule of a training that never clears its gradients, with a non-finite loss in step 7."""
    run = tmp_path_factory.mktemp("run") / "run"
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=run, config=DebugConfig(save_debug_info=True), strict=True):
        for step in range(8):
            x = torch.randn(4, 3)
            out = model(x).square().mean()
            loss = torch.log(out * 0) if step == 7 else out
            loss.backward()
            optimizer.step()
    (event,) = Run(run).events("origin")
    return run / event.data["capsule"]


def test_the_findings_up_to_the_step_are_in_the_capsule(capsule):
    found = load_capsule(capsule)
    assert "missing-zero-grad" in [finding["rule"] for finding in found.findings]
    assert found.origin.operation == "log"
    assert found.about == {"what": "loss", "bad": "loss"}


def test_a_replay_prints_the_findings(capsule, tmp_path, monkeypatch):
    (tmp_path / "made.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(3, 1)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(replay, [str(capsule), "--model-from", "made:make"])
    assert "The run had, before that step:" in result.output
    assert "missing-zero-grad" in result.output


def test_findings_are_read_as_they_were_saved_and_a_capsule_without_the_field_is_readable(tmp_path):
    arguments = {"step": 1, "model": nn.Linear(2, 2), "args": (), "kwargs": {}}
    assert load_capsule(save_capsule(tmp_path, **arguments, findings=[FINDING])).findings == (FINDING,)
    old = save_capsule(tmp_path, **arguments)
    fields = json.loads((old / "capsule.json").read_text(encoding="utf-8"))
    del fields["findings"]
    (old / "capsule.json").write_text(json.dumps(fields), encoding="utf-8")
    assert load_capsule(old).findings == ()


HOSTILE = {
    "a number": 7,
    "a text": "x",
    "numbers": [1],
    "half a finding": [{"rule": "x"}],
    "a step that is a text": [FINDING | {"step": "1"}],
    "a cause that is a list": [FINDING | {"cause": ["a"]}],
    "a thousand": [FINDING] * 1000,
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_invalid_findings_are_refused(hostile, tmp_path):
    path = save_capsule(tmp_path, step=1, model=nn.Linear(2, 2), args=(), kwargs={})
    fields = json.loads((path / "capsule.json").read_text(encoding="utf-8"))
    (path / "capsule.json").write_text(json.dumps(fields | {"findings": hostile}), encoding="utf-8")
    with pytest.raises(SondeError, match="findings"):
        load_capsule(path)
