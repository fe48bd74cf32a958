"""`with sonde.find_origin() as search:` finds the operation that creates a NaN or an Inf in a block of code."""

from collections.abc import Mapping

from torch import nn

from sonde.errors import SondeError
from sonde.nonfinite.operation_tracer import NonFiniteTracer


def find_origin(
    model: nn.Module | Mapping[str, nn.Module] | None = None, *, raise_on_origin: bool = False, ignore_masks: bool = True
) -> NonFiniteTracer:
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
    return NonFiniteTracer(models, ignore_masks=ignore_masks, raise_on_origin=raise_on_origin)
