"""Lists the modules that a profile times, with their timers."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

import torch
from torch import nn

from sonde.capture.layer_timing.forward_timers import ModuleTimers
from sonde.capture.user_source_line import is_library
from sonde.statistics.private_torch_api import is_compiled, unwrap_compiled


class TimedModule(NamedTuple):
    """Name, class and size of a module, as the report shows them."""

    path: str
    kind: str
    depth: int
    parameter_bytes: int  # including the modules inside
    source: str


class TimedModules(NamedTuple):
    """All modules of some models, in the order of their timers."""

    layers: list[TimedModule]
    opaque_paths: list[str]  # modules without timers inside: compiled, scripted, replicated
    timers: ModuleTimers

    @classmethod
    def of(cls, models: Mapping[str, nn.Module], *, eager: bool) -> Self:
        """`models` are keyed by the prefix of their paths. With `eager`, compiled modules run uncompiled and their submodules are timed."""
        opaque_paths: list[str] = []
        visited: set[int] = set()
        found = [each for prefix, model in models.items() for each in _submodules(model, prefix, 0, eager, opaque_paths, visited)]
        layers = [TimedModule(path, type(module).__name__, depth, _num_bytes(module), _source(module)) for path, module, depth in found]
        roots = [layer for layer, (_, _, depth) in enumerate(found) if depth == 0]
        return cls(layers, opaque_paths, ModuleTimers([module for _, module, _ in found], roots=roots))


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if not nn.parameter.is_lazy(p))


def _submodules(
    module: nn.Module, path: str, depth: int, eager: bool, opaque_paths: list[str], visited: set[int]
) -> Iterator[tuple[str, nn.Module, int]]:
    """Path, module and depth of a module and of those inside it; a shared module comes once."""
    if id(module) in visited:
        return
    visited.add(id(module))
    if eager and (original := unwrap_compiled(module)) is not None:
        yield from _submodules(original, path, depth, eager, opaque_paths, visited)
        return
    if isinstance(module, torch.jit.ScriptModule):
        opaque_paths.append(path)  # its submodules are not called from Python
        return
    yield path, module, depth
    if isinstance(module, nn.DataParallel) or (not eager and is_compiled(module)):
        opaque_paths.append(path)
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _submodules(child, f"{path}.{name}" if path else name, depth + 1, eager, opaque_paths, visited)


def _source(module: nn.Module) -> str:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or is_library(code.co_filename):
        return ""
    return f"{code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{code.co_firstlineno}"
