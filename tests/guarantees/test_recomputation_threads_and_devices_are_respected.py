"""R26: recomputation is not a second forward. R27: custom functions and tracing. R28: no hidden transfer from the device. R29: threads."""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from model_examples import BY_NAME, Checkpointed
from sonde.statistics import native_extension
from training_harness import python, visible_to_modes


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_r26_recomputation_is_not_counted_as_a_forward(reentrant: bool, tmp_path: Path) -> None:
    model = Checkpointed(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("forwards")[1].tolist() == [1] * 4
    assert run.scalar("backwards")[1].tolist() == [1] * 4
    for path in ("door", "block.0", "block.1", "block.3", "head"):
        assert run.series("activation", path, "num")[0].tolist() == [0, 1, 2, 3], path
        assert run.series("activation", path, "num", call=1)[0].size == 0


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_r26_a_whole_model_under_checkpoint_counts_one_forward(reentrant: bool, tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(5, 6, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
    run = sonde.Run(tmp_path / "run")
    counted = run.scalar("forwards")[1] + run.scalar("eval_forwards")[1]  # the re-entrant kind runs its first forward without gradients
    assert counted.tolist() == [1, 1, 1]
    assert run.last_step == 2


def test_r26_a_thousand_checkpointed_steps_leave_nothing_behind(tmp_path: Path) -> None:
    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        num_hooks, num_objects = [], []
        with sonde.watch(model, optimizer, to=tmp_path / str(reentrant), every=1, strict=True):
            for step in range(1000):
                optimizer.zero_grad()
                model(torch.randn(2, 6)).square().mean().backward()
                optimizer.step()
                if step in (100, 999):
                    gc.collect()
                    num_hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))
                    num_objects.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        assert num_hooks[0] == num_hooks[1]
        assert num_objects[1] <= num_objects[0]  # what earlier tests left may go meanwhile
        assert sonde.Run(tmp_path / str(reentrant)).scalar("forwards")[1].sum() == 1000


# -- R27 -------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Double.apply(self.first(x)))


def test_r27_a_custom_autograd_function_works_and_its_gradient_is_right(tmp_path: Path) -> None:
    model = Doubling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    (measured,) = sonde.Run(tmp_path / "run").series("activation_gradient", "first", "l2")[1]
    assert measured == pytest.approx(2 * model.second.weight.norm().item(), rel=1e-5)


def test_r27_tensor_hooks_of_the_user_and_their_removal_work(tmp_path: Path) -> None:
    model = Doubling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fired: list[float] = []
    model.first.register_forward_hook(lambda _m, _a, out: out.register_hook(lambda g: fired.append(g.abs().sum().item())) and None)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        for _ in range(2):
            out = model(torch.ones(1, 3)).sum()
            handle = out.register_hook(lambda g: fired.append(-1.0))
            handle.remove()
            out.backward()
            optimizer.step()
    assert len(fired) == 2
    assert min(fired) > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_r27_tracing_a_watched_model_gives_the_same_trace_and_counts_for_nothing(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    x = torch.randn(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [node.kind() for node in torch.jit.trace(model, x).inlined_graph.nodes()]
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), model(x))
        model(x).square().mean().backward()
        optimizer.step()
    assert [node.kind() for node in traced.inlined_graph.nodes()] == expected
    assert sonde.Run(tmp_path / "run").scalar("forwards")[1].tolist() == [2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_r27_a_model_can_be_scripted_before_or_after_it_is_watched(tmp_path: Path) -> None:
    """torch.jit.script refuses hooks on the module that it is given; between steps ours are on the door alone, so parts can be scripted."""
    model = BY_NAME["mlp"].build()
    session = sonde.watch(model, to=tmp_path / "run", every=1, strict=True)
    x = torch.ones(2, 6)
    assert torch.equal(torch.jit.script(model[0])(x), model[0](x))
    session.close()
    assert torch.equal(torch.jit.script(model)(x), model(x))


# -- R28 -------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Every operation that reaches a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Every call that asks a device for a value, and so waits for it."""

    NAMES = ("cpu", "item", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


def operations_per_step(every: int, to: Path | None) -> list[tuple[Counter[str], int]]:
    """Operations and reads per step, of a training whose own code reads nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.watch(model, optimizer, to=to, every=every, strict=True) if to else None
    x, counts = torch.randn(5, 6), []
    for _ in range(6):
        with visible_to_modes(), Operations() as operations, Reads() as reads:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        counts.append((operations.seen, reads.num))
    if session is not None:
        session.close()
    return counts[2:]  # the first steps plan


SYNCHRONISING = ("_local_scalar_dense", "_to_copy", "is_nonzero", "equal", "nonzero")


@pytest.mark.skipif(not native_extension.ENABLED, reason="the native kernel was not built here")
@pytest.mark.parametrize("every", [1, 1000], ids=["observed", "skipped"])
def test_r28_no_step_waits_for_a_device(every: int, tmp_path: Path) -> None:
    bare = operations_per_step(every, None)
    for (ours, reads), (theirs, _) in zip(operations_per_step(every, tmp_path / "run"), bare):
        extra = ours - theirs
        assert reads <= 1
        assert not any(extra[name] for name in SYNCHRONISING), extra
        # a view or an alias of a tensor computes nothing and waits for nothing
        assert set(extra) <= ({"detach", "view"} if every == 1 else {"detach"}), extra


FALLBACK = """
    import json, sys
    from pathlib import Path
    from sonde.statistics import batched_device_reads, native_extension
    from guarantees.test_recomputation_threads_and_devices_are_respected import operations_per_step
    assert not native_extension.ENABLED
    batched_device_reads.TREAT_CPU_AS_DEVICE = FAR
    print(json.dumps([operations_per_step(every, Path(str(every))) for every in (1, 1000)]))
"""


def without_native(directory: Path, *, on_device: bool) -> Any:
    """Operations and reads per step without the native kernel: on observed steps, and on others."""
    result = python(FALLBACK.replace("FAR", str(on_device)), directory, SONDE_NATIVE="0")
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def far_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A training on a device that has to be waited for: the CPU, declared to be one."""
    directory = tmp_path_factory.mktemp("far")
    return without_native(directory, on_device=True), directory


def test_r28_without_the_native_kernel_no_single_number_is_read(tmp_path: Path) -> None:
    for steps in without_native(tmp_path, on_device=False):
        for operations, reads in steps:
            assert reads == 0
            assert "_local_scalar_dense" not in operations
            assert "nonzero" not in operations


def test_r28_on_a_device_an_observed_step_makes_one_transfer_and_a_skipped_one_none(far_device: tuple[Any, Path]) -> None:
    counts, _ = far_device
    assert [[reads for _, reads in steps] for steps in counts] == [[1] * 4, [0] * 4]


def test_r28_what_a_device_answers_late_is_written_to_the_step_that_asked(far_device: tuple[Any, Path], tmp_path: Path) -> None:
    operations_per_step(1, tmp_path / "near")
    near = sonde.Run(tmp_path / "near")
    for name in ("1", "1000"):
        run = sonde.Run(far_device[1] / name)
        assert run.last_step == near.last_step
        for scalar in ("loss", "grad_norm", "backwards", "optimizer_steps"):
            assert run.scalar(scalar)[1].tolist() == pytest.approx(near.scalar(scalar)[1].tolist(), rel=1e-5), (name, scalar)


def test_r28_while_a_cuda_graph_is_captured_nothing_is_brought_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from sonde.statistics import batched_device_reads

    class OnCuda:
        """As much of a tensor as is asked before a transfer; there is no such device here."""

        device = torch.device("cuda")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for during capture")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    waiting = [(OnCuda(), lambda numbers: None)]
    assert batched_device_reads.fetch_all(waiting) == waiting  # type: ignore[arg-type]


# -- R29 -------------------------------------------------------------------------------------------


def test_r29_a_model_called_from_many_threads_at_once_is_counted_exactly(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                model(torch.ones(2, 3)).sum()
        except BaseException as error:
            errors.append(error)

    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert not any(m._forward_hooks for m in model.modules())
    assert not errors
    run = sonde.Run(tmp_path / "run")
    assert run.damage == []
    assert run.scalar("forwards")[1].tolist() == [8 * 50 + 1]
    assert not list(run.events("retired"))
