"""A capsule: one step of a training on disk, to be replayed on this or another machine.

It holds the inputs of the model, its weights and buffers, the optimizer's state, the random state, the origin that was found and the
findings of the run, as safetensors and JSON. It holds no code: the model comes from the user's script. Reading a capsule executes nothing,
also if it comes from an untrusted source.
"""

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
from sonde.nonfinite.explain_forward import dtype_name
from sonde.nonfinite.origin_types import Origin
from sonde.replay.capsule.capsule_file import DESCRIPTION, CapsuleFiles, read_files
from sonde.replay.capsule.value_serialization import DamagedError, Packer, unpack
from sonde.runlog.record_format import plain

FORMAT = 1
MAX_FINDINGS = 100
MAX_READ_MB = 8192.0  # of tensors in a capsule, unless the caller sets another limit
DEVICES = ("cpu", "cuda", "mps", "xpu")  # types with autocast


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter or a buffer of the model, with its values if they were stored."""

    shape: tuple[int, ...]
    dtype: str
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class Capsule:
    """A stored step. A value that was not stored is a `LeftOut`; `left_out` lists them with the reasons."""

    path: Path
    step: int
    model_class: str
    parameters: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    training: frozenset[str]  # paths of the modules in training mode; "" is the model itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_inputs: dict[str, Any]  # values besides the output that the loss is computed from, by the names of the user's variables
    optimizer: Any  # its state_dict(), or None
    rng: Any  # the random state before the forward, or None
    autocast: dict[str, torch.dtype]  # by type of device; only those with autocast on
    is_grad_enabled: bool
    origin: Origin | None
    about: dict[str, Any]
    left_out: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    findings: tuple[dict[str, Any], ...] = ()  # of the rules, up to the step before; as in a report's JSON


def save_capsule(
    directory: Path | str, *, step: int, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None, rng: Any = None, loss_inputs: Mapping[str, Any] | None = None,
    origin: Origin | None = None, findings: Sequence[Mapping[str, Any]] = (), about: Mapping[str, Any] | None = None, max_mb: float = 512.0,
) -> Path:  # fmt: skip
    """Stores a step as `directory/step-000041` and returns that path. Call it before the weights are updated. It changes nothing.
    The arguments are those of `pack_capsule`."""
    description, tensors = pack_capsule(
        step=step, model=model, args=args, kwargs=kwargs, optimizer=optimizer, rng=rng, loss_inputs=loss_inputs or {}, origin=origin,
        findings=findings, about=about or {}, max_mb=max_mb,
    )  # fmt: skip
    files = CapsuleFiles(Path(directory), capsule_name(step))
    try:
        files.write(description, tensors)
    except BaseException:
        files.discard()
        raise
    return files.commit()


def capsule_name(step: int) -> str:
    """The name of the directory of a capsule."""
    return f"step-{step:06d}"


def pack_capsule(
    *, step: int, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, rng: Any,
    loss_inputs: Mapping[str, Any], origin: Origin | None, findings: Sequence[Mapping[str, Any]], about: Mapping[str, Any], max_mb: float,
) -> tuple[dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """The contents of the two files of a capsule: its description and its tensors.

    Args:
        model: the model that was called, with `args` and `kwargs`.
        rng: the state of torch's generator before the call, or a dict of states by generator ("torch", "python", "numpy", "cuda").
        loss_inputs: other values that the loss is computed from, by name.
        findings: findings of a report, as in its JSON.
        about: further information, as plain values.
        max_mb: size limit. The inputs must fit; then the loss inputs, buffers, weights and optimizer state, each completely or not at all.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise SondeError(f"step must be an integer of at least 0, not {step!r}.")
    if not isinstance(model, nn.Module):
        raise SondeError(f"model must be the torch.nn.Module that was called, not a {type(model).__name__}.")
    if not max_mb >= 0:
        raise SondeError(f"max_mb must be 0 or more, not {max_mb!r}.")
    is_grad_enabled = torch.is_grad_enabled()
    with torch.no_grad():
        batch = {"args": tuple(args), "kwargs": dict(kwargs), "rng": {"torch": rng} if isinstance(rng, Tensor) else rng}
        # One packer for both: inputs of the loss are often inputs of the model too, and are stored once.
        packer, packed = _packed(batch | {"loss_inputs": dict(loss_inputs)})
        too_large = []
        if _mb(packer.tensors) > max_mb and loss_inputs:
            too_large = [f"loss_inputs: with them the capsule would exceed {max_mb:g} MB"]
            packer, packed = _packed(batch | {"loss_inputs": {}})
        size_mb = _mb(packer.tensors)
        if size_mb > max_mb:
            raise SondeError(
                f"The inputs of the model have {size_mb:,.1f} MB, and the limit of a capsule is {max_mb:g} MB.\n"
                f"Set a larger limit: max_capsule_mb = {int(size_mb) + 1}, or more to store the weights too."
            )
        tensors, left_out = dict(packer.tensors), packer.left_out + too_large
        for name in ("buffers", "parameters", "optimizer"):
            part = Packer()
            if name == "optimizer":
                packed[name] = None if optimizer is None else part.pack(optimizer.state_dict(), name)
            else:
                packed[name] = _pack_named(model.named_buffers() if name == "buffers" else model.named_parameters(), name, part)
            size_mb += _mb(part.tensors)
            if size_mb <= max_mb:
                tensors |= part.tensors
                left_out += part.left_out
            else:
                size_mb -= _mb(part.tensors)
                left_out.append(f"{name}: {_mb(part.tensors):,.1f} MB, with which the capsule would exceed {max_mb:g} MB")
                packed[name] = None if name == "optimizer" else [[*row[:3], {"left_out": "too large"}] for row in packed[name]]
        devices = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        # Short fields first, so that a person can read the file; then the long lists.
        description = {
            "format": FORMAT,
            "versions": {"sonde": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "created": time.time(),
            "step": step,
            "model": type(model).__name__,
            "training": [path for path, module in model.named_modules() if module.training],
            "autocast": {device: dtype_name(torch.get_autocast_dtype(device)) for device in devices},
            "grad": is_grad_enabled,
            "origin": origin.to_dict() if origin is not None else None,
            "findings": [dict(finding) for finding in findings][:MAX_FINDINGS],
            "about": Packer().pack(plain(about), "about"),
            "left_out": left_out,
            **packed,
        }
    return description, tensors


def _packed(values: Mapping[str, Any]) -> tuple[Packer, dict[str, Any]]:
    packer = Packer()
    return packer, {name: packer.pack(value, name) for name, value in values.items()}


def _mb(tensors: Mapping[str, Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors.values()) / 2**20


def _pack_named(named: Any, group: str, packer: Packer) -> list[list[Any]]:
    """`[name, shape, dtype, value]` of each tensor; a tied parameter comes once."""
    rows = []
    for name, tensor in named:
        value = packer.tensor(tensor, f"{group}.{name}")
        value.pop("requires_grad", None)
        rows.append([name, [] if nn.parameter.is_lazy(tensor) else list(tensor.shape), dtype_name(tensor.dtype), value])
    return rows


# ---- reading


def load_capsule(path: Path | str, *, max_mb: float = MAX_READ_MB) -> Capsule:
    """Reads and validates a capsule. Nothing in it is executed. Raises `SondeError` if there is none or if it is invalid.
    `path` is the directory or its capsule.json; `max_mb` limits the size of the tensors."""
    directory = Path(path).parent if Path(path).name == DESCRIPTION else Path(path)
    if not directory.is_dir():
        raise SondeError(
            f"No capsule in {path}: expected a directory with {DESCRIPTION}.\n"
            "Capsules are written to runs/<run>/capsules if save_debug_info is on: SONDE_SAVE_DEBUG_INFO=1 sonde run train.py"
        )
    try:
        description, tensors = read_files(directory, int(max_mb * 2**20))
        version = description.get("format")
        if type(version) is int and version > FORMAT:
            message = f"{path} is a capsule of format {version}; this version reads up to {FORMAT}."
            raise SondeError(f"{message}\nUpgrade with: pip install -U sonde")
        return _capsule(directory, description, tensors)
    except DamagedError as error:
        raise SondeError(f"{path} is not a valid capsule: {error}.\nNothing of it was used.") from None


def _capsule(path: Path, description: dict[str, Any], tensors: dict[str, Tensor]) -> Capsule:
    read = _DescriptionReader(description, tensors)
    if read.field("format", int) != FORMAT:
        raise DamagedError("its format is unknown")
    return Capsule(
        path=path,
        step=read.field("step", int),
        model_class=read.field("model", str),
        parameters=read.stored_tensors("parameters"),
        buffers=read.stored_tensors("buffers"),
        training=frozenset(read.strings("training")),
        args=read.value("args", tuple),
        kwargs=read.names("kwargs"),
        loss_inputs=read.names("loss_inputs"),
        optimizer=read.value("optimizer", object),
        rng=read.value("rng", object),
        autocast={device: unpack({"dtype": name}, {}) for device, name in read.field("autocast", dict).items() if device in DEVICES},
        is_grad_enabled=read.field("grad", bool),
        origin=read.origin(),
        about=read.value("about", dict),
        left_out=tuple(read.strings("left_out")),
        findings=read.findings(),
        versions={str(name): str(version) for name, version in read.field("versions", dict).items()},
    )


class _DescriptionReader:
    """Reads the fields of capsule.json and checks their types."""

    def __init__(self, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._description, self._tensors = description, tensors

    def field(self, name: str, kind: type) -> Any:
        return _checked(name, self._description.get(name), kind)

    def value(self, name: str, kind: type) -> Any:
        return _checked(name, unpack(self._description.get(name), self._tensors), kind)

    def names(self, name: str) -> dict[str, Any]:
        value = self.value(name, dict)
        if not all(isinstance(key, str) for key in value):
            raise DamagedError(f"{name} has a key that is not a string")
        return dict(value)

    def strings(self, name: str) -> list[str]:
        return [_checked(name, text, str) for text in self.field(name, list)]

    def stored_tensors(self, name: str) -> dict[str, StoredTensor]:
        found = {}
        for row in self.field(name, list):
            if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], str) or not isinstance(row[1], list):
                raise DamagedError(f"{name} has an entry that is not [name, shape, dtype, value]")
            value = unpack(row[3], self._tensors)
            shape = tuple(row[1])
            if isinstance(value, Tensor) and (tuple(value.shape) != shape or value.dtype is not unpack({"dtype": row[2]}, {})):
                raise DamagedError(f"the values of {row[0]!r} are {_short(value)} and should be {row[2]} {list(shape)}")
            if not all(type(size) is int for size in shape) or row[0] in found:
                raise DamagedError(f"{name} has an invalid or a second entry {row[0]!r}")
            found[row[0]] = StoredTensor(shape, str(row[2]), value if isinstance(value, Tensor) else None)
        return found

    def findings(self) -> tuple[dict[str, Any], ...]:
        data = self._description.get("findings", [])  # capsules of early versions have none
        if not isinstance(data, list) or len(data) > MAX_FINDINGS:
            raise DamagedError("its findings cannot be read")
        for finding in data:
            for name in ("rule", "severity", "where", "cause", "fix"):
                _checked("findings", _checked("findings", finding, dict).get(name), str)
            _checked("findings", finding.get("step"), int)
        return tuple(data)

    def origin(self) -> Origin | None:
        data = self._description.get("origin")
        if data is None:
            return None
        try:
            origin = Origin.from_dict(data)
            origin.summary()  # fails if a field has the wrong type
        except Exception as error:  # from_dict does not validate its input
            raise DamagedError(f"its origin cannot be read: {type(error).__name__}") from None
        return origin


def _checked(name: str, value: Any, kind: type) -> Any:
    if kind is not object and type(value) is not kind:
        raise DamagedError(f"{name} should be a {kind.__name__} and is {_short(value)}")
    return value


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return repr(value)[:60] if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
