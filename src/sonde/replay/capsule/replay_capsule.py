"""A capsule lived through again: a model that fits gets its weights, random state and inputs, and every operation is looked at."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sonde.errors import SondeError
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import NonFiniteTracer, is_finite
from sonde.replay.capsule.capsule import Capsule, Slot
from sonde.replay.capsule.serialization import LeftOut, graft
from sonde.replay.restore_state import as_before
from sonde.statistics.tensor_utils import find_tensors

MT19937_WORDS = 624  # of the generator's state
MAX_NAMED = 3  # differences between models in one sentence


def replay(capsule: Capsule, model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> Origin | None:
    """Where the bad number of a capsule was made, with a model of the same structure. None: nothing turned bad this time.

    `loss_fn(output, …)` gets the capsule's loss inputs by their names, or in their order where it has other names for them. Without one,
    the sum of what the model puts out stands in. The model is as before afterwards, its weights too.
    """
    if not isinstance(model, nn.Module):
        raise SondeError(f"model must be a torch.nn.Module as in the capsule ({capsule.model_class}), not a {type(model).__name__}.")
    why = misfit(capsule, model)
    if why:
        raise SondeError(f"The model does not fit {capsule.path}: {why}.")
    with as_before([model]), _weights_as_before(model), ExitStack() as stack:
        caveats = enact(capsule, model)
        args, kwargs, loss_inputs = (moved(value, model) for value in (capsule.args, capsule.kwargs, capsule.loss_inputs))
        caveats += [f"{place} was left out of the capsule: None stood in" for place in _missing((args, kwargs))]
        stack.enter_context(torch.set_grad_enabled(capsule.is_grad_enabled))
        for device, dtype in capsule.autocast.items():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        tracer = stack.enter_context(NonFiniteTracer({"": model}))
        origin = None
        try:
            output = model(*graft(args, None), **graft(kwargs, None))
            loss = _stand_in(output) if loss_fn is None else _loss(loss_fn, output, loss_inputs)
            if loss_fn is None:
                caveats.append("no loss was given: the sum of the model's outputs stood in for it")
            if isinstance(loss, Tensor) and not is_finite(loss.detach()):
                origin = tracer.origin_of(loss)
            elif isinstance(loss, Tensor) and loss.requires_grad:
                wanted = [p for p in model.parameters() if p.requires_grad]
                torch.autograd.grad(loss.sum(), wanted, allow_unused=True)
        except SondeError:
            raise
        except Exception as error:
            raise SondeError(f"The model or the loss failed on what {capsule.path} holds: {type(error).__name__}: {error}") from error
    return with_caveats(origin or tracer.origin, caveats)


def with_caveats(origin: Origin | None, caveats: list[str]) -> Origin | None:
    if origin is None:
        return None
    return replace(origin, how="replayed", caveats=(*origin.caveats, *caveats))


def is_same(one: Origin | None, other: Origin | None) -> bool:
    """The same operation in the same place. A script may have grown since: then the line's text must be the same."""
    if one is None or other is None:
        return one is other
    alike = all(getattr(one, name) == getattr(other, name) for name in ("phase", "operation", "key"))
    return alike and (one.source == other.source or one.text == other.text) and _is_same_module(one.module, other.module)


def _is_same_module(one: str, other: str) -> bool:
    """A path within the whole model, or within the part of it that was called."""
    short, long = sorted((one, other), key=len)
    return long == short or not short or long.endswith(f".{short}")


# ---- fitting


def misfit(capsule: Capsule, model: nn.Module) -> str:
    """Why a model is not the one of a capsule; "" where it is."""
    if type(model).__name__ != capsule.model_class:
        return f"its class is {type(model).__name__}, the capsule's {capsule.model_class}"
    return _unlike("parameter", capsule.parameters, dict(model.named_parameters())) or _unlike(
        "buffer", capsule.buffers, dict(model.named_buffers())
    )


def _unlike(what: str, kept: dict[str, Slot], live: dict[str, Any]) -> str:
    missing = [name for name in kept if name not in live]
    if missing:
        return f"it has no {what} {_some(missing)}"
    added = [name for name in live if name not in kept]
    if added:
        return f"it has a {what} {_some(added)} that the capsule does not know"
    for name, slot in kept.items():
        if not nn.parameter.is_lazy(live[name]) and tuple(live[name].shape) != slot.shape:
            return f"its {what} {name} is {list(live[name].shape)}, the capsule's {list(slot.shape)}"
    return ""


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def enact(capsule: Capsule, model: nn.Module) -> list[str]:
    """Puts the capsule's weights, buffers, modes and random state in force. Answers what could not be."""
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    lacking = []
    with torch.no_grad():
        for name, slot in (capsule.parameters | capsule.buffers).items():
            if slot.values is None:
                lacking.append(name)
            else:
                live[name].copy_(slot.values)
    for path, module in model.named_modules():
        module.training = path in capsule.training
    caveats = [f"the capsule has no values of {_some(lacking)}: the model's own were used"] if lacking else []
    if capsule.rng is None:
        return [*caveats, "the capsule has no random state: dropout and the like differ"]
    try:
        _set_rng(capsule.rng if isinstance(capsule.rng, dict) else {})
    except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
        caveats.append(f"the random state could not be put in force: {str(error).splitlines()[0]}")
    return caveats


def _set_rng(states: dict[Any, Any]) -> None:
    if isinstance(states.get("torch"), Tensor):
        torch.set_rng_state(states["torch"])
    if isinstance(states.get("python"), tuple):
        random.setstate(states["python"])
    if isinstance(states.get("numpy"), tuple):
        if not 0 <= states["numpy"][2] <= MT19937_WORDS:  # NumPy would read beyond its memory
            raise ValueError("NumPy's has a position that cannot be")
        numpy.random.set_state(states["numpy"])
    if isinstance(states.get("cuda"), list) and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def _weights_as_before(model: nn.Module) -> Iterator[None]:
    before = [(tensor, tensor.detach().clone()) for tensor in model.parameters() if not nn.parameter.is_lazy(tensor)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)


def moved(value: Any, model: nn.Module) -> Any:
    """The capsule's tensors where the model lives; they are kept on the host."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return value if device.type == "cpu" else tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _missing(value: Any, place: str = "an input") -> list[str]:
    if isinstance(value, LeftOut):
        return [f"{place} ({value.reason})"]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for item in inside for each in _missing(item, place)]


# ---- the loss


def _loss(loss_fn: Callable[..., Tensor], output: Any, inputs: dict[str, Any]) -> Tensor:
    signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    try:
        signature.bind(output, **inputs)
    except TypeError:
        try:
            signature.bind(output, *inputs.values())
        except TypeError:
            names = ", ".join(["output", *inputs])
            raise SondeError(f"loss_fn takes {signature}, and is called with ({names}). Give it a function of these.") from None
        return loss_fn(output, *inputs.values())
    return loss_fn(output, **inputs)


def _stand_in(output: Any) -> Tensor | None:
    parts = [tensor.sum() for _, tensor in find_tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    return torch.stack(parts).sum() if parts else None
