"""`with sonde.find_origin() as search:` finds the operation that creates a NaN or an Inf in a block of code."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from sonde.errors import NonFiniteError, SondeError
from sonde.nonfinite.operation_tracer import NonFiniteTracer
from sonde.nonfinite.origin import Origin


class OriginSearch:
    """Context manager that traces its block; then `origin` is the operation that created the non-finite value, or None."""

    def __init__(self, tracer: NonFiniteTracer, *, raise_on_origin: bool) -> None:
        self._tracer = tracer
        self._should_raise = raise_on_origin
        if raise_on_origin:
            tracer.on_found = _raise

    @property
    def origin(self) -> Origin | None:
        return self._tracer.origin

    def __enter__(self) -> OriginSearch:
        self._tracer.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._tracer.__exit__()
        if self._should_raise and error is None and self.origin is not None:
            _raise(self.origin)

    def __str__(self) -> str:
        return self.origin.summary() if self.origin else "no unintended NaN or Inf was created"


def find_origin(
    model: nn.Module | Mapping[str, nn.Module] | None = None, *, raise_on_origin: bool = False, ignore_masks: bool = True
) -> OriginSearch:
    """Find the operation that creates a NaN or an Inf in a block of code, forward or backward. Results stay bit-identical.

    ```python
    with sonde.find_origin(model) as search:
        loss = criterion(model(x), y)
        loss.backward()
    print(search)
    ```

    Arguments:
        model: the model, or models by name. It is used only to name layers.
        raise_on_origin: raise `NonFiniteError` as soon as the loss, a gradient or a weight is non-finite.
        ignore_masks: ignore an Inf that the program itself writes (a mask) and that does not reach the loss.

    Returns a context manager; its `origin` is an `Origin` or None. Every operation in the block is slower: use it for a step, not for
    a run.
    """
    models = {"": model} if isinstance(model, nn.Module) else dict(model or {}) if isinstance(model, (Mapping, type(None))) else None
    if models is None or not all(isinstance(one, nn.Module) for one in models.values()):
        raise SondeError(
            f"find_origin takes a model, or models by name; this is a {type(model).__name__}.\n"
            "Type: with sonde.find_origin(model) as search: … or, without names of layers, sonde.find_origin()"
        )
    return OriginSearch(NonFiniteTracer(models, ignore_masks=ignore_masks), raise_on_origin=raise_on_origin)


def _raise(origin: Origin) -> None:
    raise NonFiniteError(origin.summary(), origin)
