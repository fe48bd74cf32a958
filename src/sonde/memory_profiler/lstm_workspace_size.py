"""The workspace of a fake LSTM, whose size torch does not know.

torch's fake LSTM on the CPU returns an empty workspace; the real one holds what the backward needs, which is most of the
memory of a recurrent network. Its size is measured on a small real LSTM and scaled.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sonde.statistics.private_torch_api import disable_dispatch_modes

_LSTM = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
_STEPS, _BATCH = 16, 8  # of the small LSTM: in a smaller one most bytes are padding
_INPUT, _WORKSPACE = 0, 3  # indices of the arguments and of the results
_STATES = (5, 6)  # hidden and cell state: [batch, hidden]


def with_workspace(func: Any, args: Any, result: Any) -> Any:
    """The result of an operation on fake tensors, with a workspace of the real size if it is an LSTM."""
    if _LSTM is None or func is not _LSTM.default or not isinstance(result, tuple) or result[_WORKSPACE].numel():
        return result
    source = args[_INPUT]
    hashable = [tuple(arg) if isinstance(arg, list) else arg for arg in args]
    shapes = tuple((tuple(arg.shape), arg.dtype) if isinstance(arg, Tensor) else arg for arg in hashable)
    num_bytes = round(_small_workspace(shapes) * source.shape[0] * source.shape[1] / (_STEPS * _BATCH))
    return (*result[:_WORKSPACE], result[_WORKSPACE].new_empty(num_bytes), *result[_WORKSPACE + 1 :])


@cache
def _small_workspace(shapes: tuple[Any, ...]) -> int:
    """Bytes of the workspace of the same layer with few time steps and samples."""
    with disable_dispatch_modes(), torch.enable_grad():  # without gradients there is no workspace
        args: list[Any] = []
        for index, shape in enumerate(shapes):
            if not (isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], torch.dtype)):
                args.append(list(shape) if isinstance(shape, tuple) else shape)
                continue
            size, dtype = list(shape[0]), shape[1]
            if index == _INPUT:
                size[0], size[1] = _STEPS, _BATCH
            elif index in _STATES:
                size[0] = _BATCH
            args.append(torch.zeros(size, dtype=dtype))
        return int(_LSTM.default(*args)[_WORKSPACE].numel()) if _LSTM is not None else 0
