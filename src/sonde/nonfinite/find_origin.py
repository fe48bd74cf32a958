"""`with sonde.find_origin() as search:` around any code that makes a bad number."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from torch import nn

from sonde.errors import NonFiniteError, SondeError
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import Tracer


class Search:
    """Looks while it is entered. Then `origin` is where the bad number began, or None where there was none."""

    def __init__(self, tracer: Tracer, *, raise_on_origin: bool) -> None:
        self._tracer = tracer
        self._raises = raise_on_origin
        if raise_on_origin:
            tracer.on_found = _raise

    @property
    def origin(self) -> Origin | None:
        return self._tracer.origin

    def __enter__(self) -> Search:
        self._tracer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tracer.__exit__(kind, error, trace)
        if self._raises and error is None and self.origin is not None:
            _raise(self.origin)

    def __str__(self) -> str:
        return self.origin.summary() if self.origin else "no bad number was made"


def find_origin(
    model: nn.Module | Mapping[str, nn.Module] | None = None, *, raise_on_origin: bool = False, ignore_masks: bool = True
) -> Search:
    """Find the operation that makes a NaN or an Inf in a block of code, forward or backward. Results stay the same, bit by bit.

    ```python
    with sonde.find_origin(model) as search:
        loss = criterion(model(x), y)
        loss.backward()
    print(search)
    ```
    The model (or models by name) only gives layers their names. Everything in the block is slower, so enter it for a step, not for a run.
    With `raise_on_origin` the block is left by a `NonFiniteError` as soon as the loss, a gradient or a weight is known to be bad.
    With `ignore_masks=False` an Inf that the program itself wrote, and that no loss follows from, counts too.
    """
    models = {"": model} if isinstance(model, nn.Module) else dict(model or {}) if isinstance(model, (Mapping, type(None))) else None
    if models is None or not all(isinstance(one, nn.Module) for one in models.values()):
        raise SondeError(
            f"find_origin takes a model, or models by name; this is a {type(model).__name__}.\n"
            "Type: with sonde.find_origin(model) as search: … or, without names of layers, sonde.find_origin()"
        )
    return Search(Tracer(models, ignore_masks=ignore_masks), raise_on_origin=raise_on_origin)


def _raise(origin: Origin) -> None:
    raise NonFiniteError(origin.summary(), origin)
