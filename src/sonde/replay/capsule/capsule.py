"""A capsule: one step of a training, kept so that it can be lived through again, here or on another machine.

It holds what the model was called with, its weights and buffers, the optimizer's state, the random state and what was found, as safetensors
and JSON.
No code: the model comes from the user's own script. Reading one executes nothing, whoever made it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sonde import __version__
from sonde.errors import SondeError
from sonde.nonfinite.origin import Origin
from sonde.replay.capsule.capsule_file import FACTS, seal, unseal
from sonde.replay.capsule.serialization import DamagedError, Packer, unkeepable, unpack
from sonde.runlog.format import plain

FORMAT = 1
MAX_FINDINGS = 100
MAX_READ_MB = 8192.0  # of tensors in a capsule: larger ones are read where the caller says so
DEVICES = ("cpu", "cuda", "mps", "xpu")  # where autocast may be on


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or a buffer: what it is like, and its values where they were kept."""

    shape: tuple[int, ...]
    dtype: str
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class Capsule:
    """A step as it was kept. Plain values; where one was left out a `LeftOut` stands, and `left_out` says why."""

    path: Path
    step: int
    model_class: str
    parameters: dict[str, Slot]
    buffers: dict[str, Slot]
    training: frozenset[str]  # paths of the modules that were in training mode; "" is the model itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_inputs: dict[str, Any]  # what the loss was computed with besides the output, by the names of the user's variables
    optimizer: Any  # its state_dict(), or None
    rng: Any  # the random state before the call, or None
    autocast: dict[str, torch.dtype]  # by type of device, where it was on
    is_grad_enabled: bool
    origin: Origin | None
    about: dict[str, Any]
    left_out: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    findings: tuple[dict[str, Any], ...] = ()  # what the rules said of the run before the step, as in a report's JSON

    @property
    def has_weights(self) -> bool:
        return all(slot.values is not None for slot in self.parameters.values())


def save_capsule(
    directory: Path | str,
    *,
    step: int,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    rng: Any = None,
    loss_inputs: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
    findings: Sequence[Mapping[str, Any]] = (),
    about: Mapping[str, Any] | None = None,
    max_mb: float = 512.0,
) -> Path:
    """Keeps a step as `directory/step-000041` and returns that. Call it before the weights are updated; nothing is changed by it.

    `rng` is a state of torch's generator, or a dict of such states by the name of their generator; `findings` are those of a report, as in
    its JSON; `about` is whatever else a reader should know. The batch must fit into `max_mb`; then come buffers, weights and optimizer
    state, each kept whole or not at all.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise SondeError(f"step must be a whole number from 0 on, not {step!r}.")
    if not isinstance(model, nn.Module):
        raise SondeError(f"model must be the torch.nn.Module that was called, not a {type(model).__name__}.")
    if not max_mb >= 0:
        raise SondeError(f"max_mb must be 0 or more, not {max_mb!r}.")
    is_grad_enabled = torch.is_grad_enabled()
    with torch.no_grad():
        batch = {"args": tuple(args), "kwargs": dict(kwargs), "rng": {"torch": rng} if isinstance(rng, Tensor) else rng}
        room = _Room(max_mb)
        # One packer for both: inputs of the loss are often inputs of the model too, and are kept once.
        packer, facts = _packed(batch | {"loss_inputs": dict(loss_inputs or {})})
        too_large = []
        if _mb(packer.tensors) > max_mb and loss_inputs:
            too_large = [f"loss_inputs: with them the capsule would exceed {max_mb:g} MB"]
            packer, facts = _packed(batch | {"loss_inputs": {}})
        room.take_batch(packer.tensors)
        tensors, left_out = dict(packer.tensors), packer.left_out + too_large
        parts = (
            ("buffers", lambda one: _slots(model.named_buffers(), "buffers", one)),
            ("parameters", lambda one: _slots(model.named_parameters(), "parameters", one)),
            ("optimizer", lambda one: None if optimizer is None else one.pack(optimizer.state_dict(), "optimizer")),
        )
        for name, pack in parts:
            part = Packer()
            facts[name] = pack(part)
            if room.take(part.tensors):
                tensors |= part.tensors
                left_out += part.left_out
            else:
                left_out.append(f"{name}: {_mb(part.tensors):,.1f} MB, with which the capsule would exceed {max_mb:g} MB")
                facts[name] = None if name == "optimizer" else _without_values(facts[name])
        # First what a person wants to read, then the long lists.
        facts = {
            "format": FORMAT,
            "versions": {"sonde": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "created": time.time(),
            "step": step,
            "model": type(model).__name__,
            "training": [path for path, module in model.named_modules() if module.training],
            "autocast": {
                device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                for device in DEVICES
                if torch.is_autocast_enabled(device)
            },
            "grad": is_grad_enabled,
            "origin": origin.to_dict() if origin is not None else None,
            "findings": [dict(finding) for finding in findings][:MAX_FINDINGS],
            "about": Packer().pack(plain(about or {}), "about"),
            "left_out": left_out,
            **facts,
        }
    return seal(Path(directory), f"step-{step:06d}", facts, tensors)


def _packed(values: Mapping[str, Any]) -> tuple[Packer, dict[str, Any]]:
    packer = Packer()
    return packer, {name: packer.pack(value, name) for name, value in values.items()}


class _Room:
    """How much of the size that a capsule may have is left."""

    def __init__(self, max_mb: float) -> None:
        self.max_mb = self.left_mb = max_mb

    def take_batch(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.take(tensors):
            raise SondeError(
                f"What the model was called with takes {_mb(tensors):,.1f} MB, and a capsule may have {self.max_mb:g} MB.\n"
                f"Set a larger one: max_capsule_mb = {int(_mb(tensors)) + 1}, or more if the weights are to fit too."
            )

    def take(self, tensors: Mapping[str, Tensor]) -> bool:
        fits = _mb(tensors) <= self.left_mb
        self.left_mb -= _mb(tensors) if fits else 0.0
        return fits


def _mb(tensors: Mapping[str, Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 2**20


def _slots(named: Any, group: str, packer: Packer) -> list[list[Any]]:
    """`[name, shape, dtype, value]` of each; a tied parameter comes once."""
    rows = []
    for name, tensor in named:
        is_lazy = nn.parameter.is_lazy(tensor)
        value = packer.tensor(tensor, f"{group}.{name}")
        if not unkeepable(tensor):
            value.pop("requires_grad", None)
        rows.append([name, [] if is_lazy else list(tensor.shape), str(tensor.dtype).removeprefix("torch."), value])
    return rows


def _without_values(slots: Any) -> list[list[Any]]:
    return [[*row[:3], {"left_out": "too large"}] for row in slots]


# ---- reading


def load_capsule(path: Path | str, *, max_mb: float = MAX_READ_MB) -> Capsule:
    """Reads a capsule, whoever made it: it is checked from end to end and nothing in it is executed."""
    directory = Path(path).parent if Path(path).name == FACTS else Path(path)
    if not directory.is_dir():
        raise SondeError(
            f"No capsule in {path}: expected a directory with {FACTS}.\n"
            "Capsules are kept in runs/<run>/capsules when save_debug_info is on: SONDE_SAVE_DEBUG_INFO=1 sonde run train.py"
        )
    try:
        facts, tensors = unseal(directory, int(max_mb * 2**20))
        version = facts.get("format")
        if type(version) is int and version > FORMAT:
            told = f"{path} is a capsule of format {version}; this version reads up to {FORMAT}."
            raise SondeError(f"{told}\nUpgrade with: pip install -U sonde")
        return _capsule(directory, facts, tensors)
    except DamagedError as error:
        raise SondeError(f"{path} is not a sound capsule: {error}.\nNothing of it was used.") from None


def _capsule(path: Path, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Capsule:
    read = _Facts(facts, tensors)
    if read.of("format", int) != FORMAT:
        raise DamagedError("it has no format that is known")
    return Capsule(
        path=path,
        step=read.of("step", int),
        model_class=read.of("model", str),
        parameters=read.slots("parameters"),
        buffers=read.slots("buffers"),
        training=frozenset(read.texts("training")),
        args=read.value("args", tuple),
        kwargs=read.names("kwargs"),
        loss_inputs=read.names("loss_inputs"),
        optimizer=read.value("optimizer", object),
        rng=read.value("rng", object),
        autocast={device: read.dtype(name) for device, name in read.of("autocast", dict).items() if device in DEVICES},
        is_grad_enabled=read.of("grad", bool),
        origin=read.origin(),
        about=read.value("about", dict),
        left_out=tuple(read.texts("left_out")),
        findings=read.findings(),
        versions={str(name): str(version) for name, version in read.of("versions", dict).items()},
    )


class _Facts:
    """The content of capsule.json, each field with the type that it must have."""

    def __init__(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._facts, self._tensors = facts, tensors

    def of(self, name: str, kind: type) -> Any:
        value = self._facts.get(name)
        if type(value) is not kind:
            raise DamagedError(f"{name} should be a {kind.__name__} and is {_short(value)}")
        return value

    def value(self, name: str, kind: type) -> Any:
        value = unpack(self._facts.get(name), self._tensors)
        if not isinstance(value, kind):
            raise DamagedError(f"{name} should be a {kind.__name__} and is {_short(value)}")
        return value

    def names(self, name: str) -> dict[str, Any]:
        value = self.value(name, dict)
        if not all(isinstance(key, str) for key in value):
            raise DamagedError(f"{name} holds something that has no name")
        return dict(value)

    def texts(self, name: str) -> list[str]:
        value = self.of(name, list)
        if not all(isinstance(text, str) for text in value):
            raise DamagedError(f"{name} should hold texts alone")
        return list(value)

    def slots(self, name: str) -> dict[str, Slot]:
        found = {}
        for row in self.of(name, list):
            if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], str) or not isinstance(row[1], list):
                raise DamagedError(f"{name} holds something that is none")
            value = unpack(row[3], self._tensors)
            shape = tuple(row[1])
            if isinstance(value, Tensor) and (tuple(value.shape) != shape or value.dtype is not self.dtype(row[2])):
                raise DamagedError(f"the values of {row[0]!r} are {_short(value)} and should be {row[2]} {list(shape)}")
            if not all(type(size) is int for size in shape) or row[0] in found:
                raise DamagedError(f"{name} speaks of {row[0]!r} in a way that cannot be meant")
            found[row[0]] = Slot(shape, str(row[2]), value if isinstance(value, Tensor) else None)
        return found

    def dtype(self, name: object) -> torch.dtype:
        dtype: torch.dtype = unpack({"dtype": name}, {})
        return dtype

    def findings(self) -> tuple[dict[str, Any], ...]:
        data = self._facts.get("findings", [])  # the first capsules had none
        if not isinstance(data, list) or len(data) > MAX_FINDINGS or not all(_is_finding(one) for one in data):
            raise DamagedError("its findings cannot be read")
        return tuple(data)

    def origin(self) -> Origin | None:
        data = self._facts.get("origin")
        if data is None:
            return None
        try:
            origin = Origin.from_dict(data)
            origin.summary()  # what cannot be said cannot have been written by us
        except Exception as error:  # from_dict trusts what it is given; this came from anywhere
            raise DamagedError(f"its origin cannot be read: {type(error).__name__}") from None
        return origin


def _is_finding(one: object) -> bool:
    texts = ("rule", "severity", "where", "cause", "fix")
    return isinstance(one, dict) and all(type(one.get(name)) is str for name in texts) and type(one.get("step")) is int


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)[:60] if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
