"""A training of which too little could be seen is never called healthy: the verdict is unknown, and says what is missing."""

from __future__ import annotations

import os
from textwrap import dedent

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import fork_server
import sonde

pytestmark = pytest.mark.torch


class Wrapped(torch.Tensor):
    """Holds another tensor and computes with it. `lacking` are operations that it does not have."""

    held: torch.Tensor
    lacking: frozenset = frozenset()

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, requires_grad=held.requires_grad
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in Wrapped.lacking:
            raise NotImplementedError(f"Wrapped lacks {func}")
        args, kwargs = tree_map_only(Wrapped, lambda one: one.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))


def wrapped_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(Wrapped(parameter.detach())))
    return model


def train(model, wrap=lambda tensor: tensor, *, bad_from=1000, num_steps=40):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for step in range(num_steps):
        x = torch.randn(32, 8)
        y = x.sum(1, keepdim=True)
        if step >= bad_from:
            x[0] = float("nan")
        loss = nn.functional.mse_loss(model(wrap(x)), wrap(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_class_of_tensors_with_its_own_dispatch_is_seen_to_become_nan(tmp_path):
    model = wrapped_model()
    with sonde.watch(model, to=tmp_path / "run") as session:
        train(model, Wrapped, bad_from=25)
    report = session.report()
    assert report.verdict == "problems"
    assert min(finding.step for finding in report.findings) == 25


def test_a_class_of_tensors_that_lacks_the_operations_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(Wrapped, "lacking", frozenset({"_local_scalar_dense", "nan_to_num", "linalg_vector_norm", "stack", "cat"}))
    model = wrapped_model()
    with sonde.watch(model, to=tmp_path / "run") as session:
        train(model, Wrapped, bad_from=25)
    report = session.report()
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert report.why_unknown.startswith("The loss was read in no step: ")
    assert "No parameters could be measured: " in report.why_unknown
    assert "nonfinite-loss" not in report.clear


def test_losses_that_are_no_scalars_are_unknown(tmp_path):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, to=tmp_path / "run") as session:
        for _ in range(20):
            optimizer.zero_grad()
            losses = model(torch.randn(32, 8)).square().mean(1)
            losses.backward(torch.ones(32))
            optimizer.step()
    assert session.report().why_unknown.startswith("The loss was read in no step: backward started from a tensor of shape [32].")


def test_the_loss_of_several_numbers_is_their_sum(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, sums = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), []
    with sonde.watch(model, optimizer, to=tmp_path / "run") as session:
        for step in range(60):
            optimizer.zero_grad()
            losses = [(model(x) - x[:, :1]).square().mean(), 0.01 * model.weight.square().sum()]
            losses = losses if step else losses[:1]
            torch.autograd.backward(losses)
            sums.append(sum(loss.item() for loss in losses))
            optimizer.step()
    report = session.report()
    assert (report.verdict, report.why_unknown) == ("healthy", "")
    assert [value for _, value in report.run.loss] == pytest.approx(sums)


def test_weights_of_two_models_with_the_same_names_are_all_checked_at_the_end(tmp_path):
    actor, critic = nn.Linear(8, 1), nn.Linear(8, 1)
    with sonde.watch(actor, to=tmp_path / "run") as session:
        train(actor)
        train(critic)
        with torch.no_grad():
            actor.weight[0, 3] = float("nan")
    assert [(finding.rule, finding.where) for finding in session.report().findings] == [("nonfinite-parameter", "weight")]


class WithForbiddenClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.tensor([0.0, float("-inf")]))
        self.linear = nn.Linear(8, 2)

    def forward(self, x):
        return (self.linear(x) + self.offset)[:, :1]


def test_weights_that_are_infinite_on_purpose_are_not_reported_and_do_not_hide_others(tmp_path):
    for name, expected in (("as it was", []), ("broken", [("nonfinite-parameter", "linear.weight")])):
        model = WithForbiddenClass()
        with sonde.watch(model, to=tmp_path / name) as session:
            train(model)
            if expected:
                nn.init.constant_(model.linear.weight, float("nan"))
        assert [(finding.rule, finding.where) for finding in session.report().findings] == expected


def test_a_forked_child_that_trains_is_counted(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with sonde.watch(model, to=tmp_path / "run") as session:
        train(model)
        pid = os.fork()
        if pid == 0:
            try:
                train(model, bad_from=5, num_steps=30)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    report = session.report()
    assert report.verdict == "unknown"
    assert report.why_unknown.startswith("30 training steps ran in forked child processes.")
    assert report.run.num_steps == 40


def test_weights_that_become_nan_after_the_last_step_are_found(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with sonde.watch(model, to=tmp_path / "run") as session:
        train(model)
        with torch.no_grad():
            model[2].weight[0, 3] = float("nan")
    report = session.report()
    assert [(finding.rule, finding.where) for finding in report.findings] == [("nonfinite-parameter", "2.weight")]


FREED = """
    import os
    import torch
    from torch import nn
    torch.manual_seed(0)
    def train(last_rate):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(30):
            x = torch.randn(32, 8)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            if step == 29:
                optimizer.param_groups[0]["lr"] = last_rate
            optimizer.step()
    train(float("nan"))
    train(0.01)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
"""


def test_weights_that_are_nan_when_a_function_frees_its_model_are_found_also_where_the_script_changes_its_directory(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(dedent(FREED))
    done = fork_server.python("-m", "sonde", "run", "--check", "--to", "run", program, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"run         {tmp_path / 'run'}" in done.stderr
    (finding,) = sonde.diagnose(tmp_path / "run").findings
    assert (finding.rule, finding.where, finding.step) == ("nonfinite-parameter", "0.weight", 29)
    assert finding.cause.startswith("when the program freed the model, after step 29, 128 of 128 numbers of 0.weight are NaN or Inf")


def test_weights_that_are_nan_in_one_of_two_models_with_the_same_layers_are_found(tmp_path):
    first, second = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2))
    with sonde.watch(first, to=tmp_path / "run") as session:
        session.attach(second, name="critic")
        train(first)
        train(second)
        with torch.no_grad():
            first[2].weight[0, 3] = float("nan")
    assert [(finding.rule, finding.where) for finding in session.report().findings] == [("nonfinite-parameter", "2.weight")]


FULL_DISK = """
    import resource, sys
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, 48 << 10))
    for step in range(80):
        x = torch.randn(32, 8)
        y = x.sum(1, keepdim=True)
        if step >= int(sys.argv[1]):
            x[0] = float("nan")
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("bad_from", "exit_code"), [(50, 1), (1000, 3)], ids=["nan", "finite"])
def test_on_a_full_disk_a_nan_is_reported_and_nothing_is_called_healthy(bad_from, exit_code, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(dedent(FULL_DISK))
    run = tmp_path / "run"
    done = fork_server.python("-m", "sonde", "run", "--every", "1", "--check", "--to", run, program, str(bad_from), cwd=tmp_path)
    assert done.returncode == exit_code, done.stderr
    report = sonde.diagnose(run)
    assert report.exit_code == exit_code
    if exit_code == 1:
        assert {"nonfinite-loss", "nan-input"} & {finding.rule for finding in report.findings}
    else:
        assert "could not be written ([Errno 27] File too large)" in report.why_unknown


SPAWNED = """
    import torch
    import torch.multiprocessing as mp
    def child(index):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    if __name__ == "__main__":
        mp.spawn(child, nprocs=1)
"""


def test_a_training_in_spawned_processes_says_that_they_are_not_watched_and_how_to_watch_them(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(dedent(SPAWNED))
    done = fork_server.python("-m", "sonde", "run", "--check", "--to", tmp_path / "run", program, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "Child processes are not watched: call sonde.watch(model, optimizer)" in " ".join(done.stderr.split())
