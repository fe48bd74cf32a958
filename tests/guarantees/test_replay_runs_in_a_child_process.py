"""R77: no code of the user runs a second time in the training process. A bad step runs again in a forked, isolated child, so a training
with an incident is byte for byte the training without Sonde, and its run holds an answer."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="isolation of the child needs Linux")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import sonde  # noqa: E402
from guarantees.replay_programs import losses_made_elsewhere, shared_memory, side_effects  # noqa: E402
from guarantees.replay_programs.small_training import BAD_STEP, INCIDENTS  # noqa: E402
from training_harness import call, python  # noqa: E402

PROGRAMS = Path(__file__).parent / "replay_programs"
TIMEOUT_S = 150  # a hanging program, not a slow one
ANSWERS = {"nan": "origin", "spike": "spike", "skip": "overflow"}


class Trained:
    """The folders of a program that ran bare and watched."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        for how in ("bare", "watched"):
            done = call("-m", f"guarantees.replay_programs.{name}", how, str(folder / how), folder=folder, timeout=TIMEOUT_S)
            assert done.returncode == 0, done.stderr[-2000:]

    def files(self, how: str, name: str) -> dict[str, bytes]:
        """All that a training left behind, its output included."""
        root = self.folder / how / name
        files = (path for path in root.rglob("*") if path.is_file() and root / "run" not in path.parents)
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}

    def answer(self, name: str) -> dict[str, Any]:
        """The one answer about the bad step."""
        kind = ANSWERS[name.rpartition("-")[2]]
        events = [event for event in sonde.Run(self.folder / "watched" / name / "run").events() if event.kind in (kind, "origin_unknown")]
        (found,) = (event.data for event in events if event.step == BAD_STEP)
        return found

    def assert_equal(self, name: str) -> None:
        bare, watched = self.files("bare", name), self.files("watched", name)
        assert {"stdout", "outcome.json"} <= bare.keys()
        assert watched == bare


# -- side effects ----------------------------------------------------------------------------------

# What a copy of the process cannot do again, and the words that say so.
REFUSED = {
    side_effects.process_queue: "another process", side_effects.pipe: "another process", side_effects.socket_pair: "another process",
    side_effects.csv_opened_inside: "rows.csv for writing",
}  # fmt: skip


@pytest.fixture(scope="module")
def with_side_effects(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained("side_effects", tmp_path_factory.mktemp("side_effects"))


@pytest.mark.parametrize("incident", INCIDENTS)
@pytest.mark.parametrize("effect", side_effects.EFFECTS, ids=lambda effect: effect.__name__)
def test_r77_a_side_effect_of_a_bad_step_happens_once_and_the_step_is_explained(
    effect: Callable[..., Any], incident: str, with_side_effects: Trained
) -> None:
    name = f"{effect.__name__}-{incident}"
    with_side_effects.assert_equal(name)
    answer = with_side_effects.answer(name)
    reason = REFUSED.get(effect)
    if incident == "nan":
        assert answer["operation"] == "log"
        if reason is None:
            assert (answer["how"], answer["samples"], answer["text"][:17]) == ("replayed", [5], "score = torch.log")
        else:
            assert answer["how"] == "graph"
            assert any(reason in caveat for caveat in answer["caveats"])
    elif incident == "spike":
        assert answer["samples"] == ([5] if reason is None else None)
        assert reason is None or any(reason in caveat for caveat in answer["caveats"])
    elif reason is None:
        assert (answer["by"], answer["origin"]["operation"]) == ("number", "sqrt")
    else:
        assert reason in answer["reason"]


# -- shared memory ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained("shared_memory", tmp_path_factory.mktemp("shared_memory"))


@pytest.mark.parametrize("incident", ["nan", "spike"])
@pytest.mark.parametrize("program", shared_memory.PROGRAMS, ids=lambda program: program.__name__)
def test_r77_memory_that_processes_share_is_not_changed_by_a_replay(
    program: Callable[..., Any], incident: str, with_shared_memory: Trained
) -> None:
    name = f"{program.__name__}-{incident}"
    with_shared_memory.assert_equal(name)
    answer = with_shared_memory.answer(name)
    assert (answer["how"], answer["samples"]) == ("replayed", [5])


# -- losses that are made elsewhere ----------------------------------------------------------------


@pytest.fixture(scope="module")
def with_loss_made_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained("losses_made_elsewhere", tmp_path_factory.mktemp("losses"))


@pytest.mark.parametrize("program", losses_made_elsewhere.PROGRAMS, ids=lambda program: program.__name__)
def test_r77_a_bad_operation_is_found_wherever_the_loss_is_made(program: Callable[..., Any], with_loss_made_elsewhere: Trained) -> None:
    with_loss_made_elsewhere.assert_equal(f"{program.__name__}-nan")
    answer = with_loss_made_elsewhere.answer(f"{program.__name__}-nan")
    assert (answer["operation"], answer["how"]) == ("log", "replayed")
    assert answer["text"].endswith("# bad") or "# bad" in source_line(answer["source"])


@pytest.mark.parametrize("program", losses_made_elsewhere.PROGRAMS, ids=lambda program: program.__name__)
def test_r77_a_spike_is_attributed_wherever_the_loss_is_made(program: Callable[..., Any], with_loss_made_elsewhere: Trained) -> None:
    with_loss_made_elsewhere.assert_equal(f"{program.__name__}-spike")
    answer = with_loss_made_elsewhere.answer(f"{program.__name__}-spike")
    is_rollout = program.__name__.startswith("actor_critic")  # its samples are single calls of the model, not rows of a batch
    assert answer["samples"] == ([5] if not is_rollout else None)
    assert answer["gradients"]


def source_line(source: str) -> str:
    name, _, line = source.rpartition(":")
    return (PROGRAMS / name).read_text().splitlines()[int(line) - 1]


# -- what is called in the training process ---------------------------------------------------------

CALLS: Counter[tuple[str, int]] = Counter()  # by name and process; a child counts in its own copy


def count(name: str) -> None:
    CALLS[name, os.getpid()] += 1


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8 * 50

    def __getitem__(self, index: int) -> Tensor:
        count("dataset")
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        count("function forward")
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        count("function backward")
        return 2 * ctx.saved_tensors[0] * grad


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        count("inner")
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.inner.register_forward_hook(lambda *args: count("forward hook"))
        self.inner.register_forward_pre_hook(lambda *args: count("forward pre-hook"))
        self.inner.register_full_backward_hook(lambda *args: count("backward hook"))
        self.inner.linear.weight.register_hook(lambda grad: count("tensor hook"))
        self.inner.linear.bias.register_post_accumulate_grad_hook(lambda p: count("accumulation hook"))

    @property
    def scale(self) -> float:
        count("property")
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        count("outer")
        return (self.inner(x)[:, 0] * 1e3 * self.scale) / 1e3  # overflows with huge inputs


def counted_loss(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    count("loss")
    return (Square.apply(out - y) - 0.01 * torch.log((1 + out.square()) * weight)).mean()


def pack(tensor: Tensor) -> Tensor:
    count("pack")
    return tensor.clone()


def unpack(tensor: Tensor) -> Tensor:
    count("unpack")
    return tensor


def counted_training(incident: str, watch: Callable[[nn.Module, torch.optim.Optimizer], Any] | None) -> dict[str, int]:
    """How often each function of the user was called in this process."""
    torch.manual_seed(0)
    CALLS.clear()
    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=incident == "skip", init_scale=1024.0)
    with watch(model, optimizer) if watch is not None else contextlib.nullcontext():
        train_counted(model, optimizer, scaler, incident)
    return {name: num for (name, pid), num in CALLS.items() if pid == os.getpid()}


def train_counted(model: Outer, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, incident: str) -> None:
    for step, x in enumerate(DataLoader(Numbers(), batch_size=8)):
        y, weight, slope = x.sum(1), torch.ones(8), 1.0
        if step == 40:
            weight[5] = 0.0 if incident == "nan" else 1.0
            y[5] = 60.0 if incident == "spike" else y[5]
            slope = 0.0 if incident in ("skip", "gradient") else 1.0
            if incident.startswith("evaluation"):
                x = x.sign() * (torch.nan if incident == "evaluation nan" else 1e38)
        if step == 40 and incident.startswith("evaluation"):
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            continue
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = counted_loss(model(x), y, weight)
            loss = loss + 0.01 * (model.inner.linear.weight * slope).square().sum().sqrt()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()) or incident in ("skip", "gradient"):
            scaler.step(optimizer)
        scaler.update()
        if incident == "gradient" and step == 40:
            break


quiet = pytest.mark.filterwarnings("ignore:Full backward hook")  # inputs need no gradient
COUNTED = ("nan", "gradient", "spike", "skip", "evaluation nan", "evaluation inf")


@quiet
@pytest.mark.parametrize("incident", COUNTED)
def test_r77_no_function_of_the_user_is_called_a_second_time_in_the_training_process(incident: str, tmp_path: Path) -> None:
    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return sonde.watch(model, optimizer, to=tmp_path / "run", strict=True, config=sonde.DebugConfig(save_debug_info=True))

    assert counted_training(incident, watch) == counted_training(incident, None)
    kind = {"spike": "spike", "skip": "overflow"}.get(incident, "origin")
    assert [event.step for event in sonde.Run(tmp_path / "run").events(kind)] == [40]


@quiet
@pytest.mark.parametrize("incident", COUNTED)
def test_r77_a_replay_in_the_process_is_counted(incident: str, tmp_path: Path) -> None:
    """The alarm of the test above works."""

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return sonde.watch(model, optimizer, to=tmp_path / "run", strict=True, config=sonde.DebugConfig(replay="in_process"))

    again = Counter(counted_training(incident, watch))
    again.subtract(counted_training(incident, None))
    assert min(again["outer"], again["inner"], again["forward hook"], again["forward pre-hook"], again["property"]) > 0


@quiet
@pytest.mark.parametrize("bad", [False, True])
def test_r77_the_search_of_the_loop_debugger_calls_nothing_again(bad: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    CALLS.clear()
    model = Outer()
    x, y = torch.randn(8, 4), torch.zeros(8)
    weight = torch.ones(8)
    weight[5] = 0.0 if bad else 1.0
    tool = sonde.PyTorchDebugger(sonde.DebugConfig(output_dir=str(tmp_path)))
    tool.debug_training_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, target: counted_loss(out, target, weight), x, y
    )
    notes = tool.create_debug_report()["details"]["notes"]
    assert any("cause: log" in note for note in notes) == bad
    assert {name for (name, pid), num in CALLS.items() if pid == os.getpid() and num != 1} == set()


NO_CHILD = """
    import os, resource, sonde, torch
    import sonde.incidents.nonfinite_handler  # while this process may still read all files
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.num = nn.Linear(4, 1), 0

        def inner(self, x):
            self.num += 1
            return (self.linear(x) * 1.5).square()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to="run", strict=True):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        if os.getuid() == 0:  # root may always fork
            os.setresuid(65534, 65534, 65534)
        for step in range(6):
            loss = torch.log(model(torch.ones(8, 4)) * (0.0 if step == 3 else 1.0)).mean()
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite():
                optimizer.step()
    print(model.num)
"""


def test_r77_without_a_child_the_graph_is_read_without_unpacking_what_hooks_have_packed() -> None:
    """Unpacking a checkpoint would run the forward again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        done = python(NO_CHILD, folder)
        assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr[-2000:]
        (found,) = (event.data for event in sonde.Run(folder / "run").events("origin"))
    assert (found["operation"], found["how"]) == ("log", "graph")
    assert any("no process could be started" in caveat for caveat in found["caveats"])


# -- the user's own view of local variables --------------------------------------------------------


@pytest.mark.parametrize("incident", ["nan", "spike"])
def test_r77_a_dictionary_of_locals_that_the_user_keeps_is_not_changed_by_an_incident(incident: str, tmp_path: Path) -> None:
    def train(watched: bool) -> list[dict[str, str]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rate, seen = 0.1, []
        config = locals()
        with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) if watched else contextlib.nullcontext():
            for step in range(45):
                x = torch.randn(8, 4)
                y = x.sum(1, keepdim=True) + (60.0 if step == 40 and incident == "spike" else 0.0)
                loss = F.mse_loss(model(x), y) + torch.log(model.weight.square().sum() * (0.0 if step == 40 and incident == "nan" else 1.0))
                optimizer.zero_grad()
                loss.backward()
                if loss.isfinite():
                    optimizer.step()
                rate = rate * 0.9
                seen.append({name: type(value).__name__ for name, value in config.items()} | {"rate": repr(config["rate"])})
        return seen

    assert train(True) == train(False)
    assert list(sonde.Run(tmp_path / "run").events("origin" if incident == "nan" else "spike"))
