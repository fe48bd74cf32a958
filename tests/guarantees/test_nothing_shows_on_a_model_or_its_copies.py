"""R09: nothing of ours shows on a model. R10: copies of a watched model are not watched. R11: `pause()` hides us from profilers."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

import sonde
from model_examples import BY_NAME, PROGRAMS, Program
from training_harness import bare, digest, python, seed, watched


def looks(model: nn.Module) -> Any:
    return (
        list(model.state_dict()), [name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()], repr(model), dir(model), sorted(vars(model)),
    )  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_r09_a_watched_model_looks_as_before(program: Program, tmp_path: Path) -> None:
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, keys = looks(model), sorted(vars(optimizer))
    seen = []
    # in the middle of an observed forward too
    handle = list(model.modules())[-1].register_forward_hook(lambda *_: seen.append(looks(model)))
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        assert looks(model) == before
        program.loss(model).backward()
        optimizer.step()
        assert looks(model) == before
    handle.remove()
    assert all(look == before for look in seen)
    assert sorted(vars(optimizer)) == keys


# -- R10 -------------------------------------------------------------------------------------------


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": _pickled, "torch.save": _saved, "copy": copy.copy}


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_r10_a_copy_of_a_watched_model_works_and_is_not_watched(way: str, tmp_path: Path) -> None:
    model = BY_NAME["conv"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        twin = COPIES[way](model)
        assert digest(twin.state_dict()) == digest(model.state_dict())
        twin(torch.ones(2, 3, 6, 6)).sum().backward()
        twin(torch.ones(2, 3, 6, 6)).sum()
        BY_NAME["conv"].loss(model).backward()
        optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("forwards")[1].tolist() == [1]
    assert run.series("activation", "0", "num")[0].tolist() == [0]


def test_r10_a_model_copied_in_the_middle_of_an_observed_forward_is_not_watched(tmp_path: Path) -> None:
    """A user's own hook copies the whole model while our hooks are on its leaves."""
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twins: list[nn.Module] = []
    model[2].register_forward_pre_hook(lambda *_: twins.extend((copy.deepcopy(model[0]), _pickled(model[0]))))
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        model(torch.ones(2, 6)).sum().backward()
        for twin in twins:
            twin(torch.ones(7, 6))
        optimizer.step()
    assert len(twins) == 2
    assert sonde.Run(tmp_path / "run").series("activation", "0", "num")[1].tolist() == [2 * 8]


def test_r10_a_saved_model_loads_where_sonde_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        torch.save(model, tmp_path / "between.pt")
        handle = model[1].register_forward_hook(_save_whole(model, tmp_path / "inside.pt"))
        model(torch.ones(1, 2)).sum().backward()
        handle.remove()
        optimizer.step()
    loading = """
        import sys
        sys.modules["sonde"] = None      # any import of it fails
        import torch
        for name in ("between.pt", "inside.pt"):
            model = torch.load(name, weights_only=False)
            print(tuple(model(torch.ones(4, 2)).shape))
    """
    result = python(loading, tmp_path, name="load.py")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "(4, 3)\n(4, 3)\n"


class _save_whole:
    def __init__(self, model: nn.Module, path: Path) -> None:
        self.model, self.path = model, path

    def __call__(self, *_: Any) -> None:
        torch.save(self.model, self.path)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def test_r10_a_running_average_of_the_weights_is_the_same_with_and_without_sonde(tmp_path: Path) -> None:
    def average(observe: Any) -> str:
        seed()
        model = BY_NAME["conv"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with observe(model, optimizer):
            ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
            for _ in range(4):
                optimizer.zero_grad()
                BY_NAME["conv"].loss(model).backward()
                optimizer.step()
                ema.update_parameters(model)
                with torch.no_grad():
                    ema(torch.ones(1, 3, 6, 6))
        return digest(ema.state_dict(), model.state_dict())

    assert average(watched(tmp_path)) == average(bare)
    run = sonde.Run(tmp_path / "run0")
    assert run.scalar("forwards")[1].tolist() == [1, 1, 1, 1]
    assert run.scalar("eval_forwards")[1].tolist() == [0, 0, 0, 0]


def test_r10_a_watched_model_can_be_sent_to_a_spawned_process(tmp_path: Path) -> None:
    code = """
        import torch, torch.multiprocessing as mp, sonde
        from torch import nn

        def work(rank, model):
            assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) > 2 for m in model.modules())
            model(torch.ones(2, 3)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

        if __name__ == "__main__":
            model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with sonde.watch(model, optimizer, to="run", every=1, strict=True):
                for _ in range(2):
                    model(torch.ones(2, 3)).sum().backward()
                    optimizer.step()
                mp.spawn(work, (model,), nprocs=1)
            print("done")
    """
    result = python(code, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    run = sonde.Run(tmp_path / "run")
    assert len(run.processes) == 1
    assert run.last_step == 1


# -- R11 -------------------------------------------------------------------------------------------


def test_r11_a_flop_counter_inside_of_a_pause_counts_what_it_counts_without_sonde(tmp_path: Path) -> None:
    model = BY_NAME["conv"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def count() -> dict[str, Any]:
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(2, 3, 6, 6)).sum().backward()
        return {name: dict(counts) for name, counts in counter.get_flop_counts().items()}

    expected = count()
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        optimizer.step()
        with session.pause():
            assert count() == expected
        model(torch.ones(2, 3, 6, 6)).sum().backward()
        optimizer.step()
    assert sonde.Run(tmp_path / "run").scalar("forwards")[1].tolist() == [0, 1]


def test_r11_a_profiler_sees_the_training_as_it_is_inside_of_a_pause(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def operations() -> dict[str, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            BY_NAME["mlp"].loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {event.key: event.count for event in profiler.key_averages()}

    operations()
    expected = operations()
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session, session.pause():
        assert operations() == expected


def test_r11_nothing_is_recorded_in_a_pause_and_everything_after_it(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()

    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        step()
        with contextlib.suppress(RuntimeError), session.pause():
            step()
            raise RuntimeError("a pause ends like any other block")
        step()
        with session.pause():
            with session.pause():
                step()
            step()
        step()
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("backwards")[1].tolist() == [1, 1, 1]
    assert run.series("activation", "0", "num")[0].tolist() == [0, 1, 2]


def test_r11_the_cost_of_sonde_is_in_the_run(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(3):
            BY_NAME["mlp"].loss(model).backward()
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    own, total = run.scalar("sonde_ms")[1], run.scalar("step_ms")[1]
    assert (own > 0).all()
    assert (own[1:] <= total[1:] * 1.5).all()  # what torch does on the way to a hook is estimated, so it may exceed by a little
