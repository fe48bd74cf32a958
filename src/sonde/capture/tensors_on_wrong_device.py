"""Finds tensors of a model on another device than the model: `model.to(device)` moves parameters and buffers, not plain attributes.

Tested with the model on the meta device, not with a real accelerator.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from sonde.statistics.private_torch_api import storage_address

MAX_REPORTED = 20  # tensors of one model


def find_left_behind(model: nn.Module) -> list[dict[str, Any]]:
    """Tensors on the CPU while most of the model is on a device. Scalars are omitted: kernels take them by value."""
    devices = Counter(parameter.device.type for parameter in model.parameters())
    main_device = devices.most_common(1)[0][0] if devices else "cpu"
    if main_device == "cpu":
        return []  # if a part is on a device, it is on purpose
    left = ((kind, path, tensor) for kind, path, tensor in _tensors(model) if tensor.device.type == "cpu" and tensor.dim())
    return [
        {"kind": kind, "path": path, "num_elements": tensor.numel(), "device": "cpu", "model_on": main_device}
        for kind, path, tensor in islice(left, MAX_REPORTED)
    ]


def find_holders(models: Iterable[nn.Module], storages: set[int]) -> dict[int, str]:
    """The storages, by address, that belong to a model, with the path of the tensor."""
    held: dict[int, str] = {}
    for model in models if storages else ():
        for _, path, tensor in _tensors(model):
            if tensor.layout is torch.strided and (address := storage_address(tensor.untyped_storage())) in storages:
                held.setdefault(address, path)
    return held


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers), ("attribute", vars(module))):
            for name, tensor in list(tensors.items()):
                if isinstance(tensor, torch.Tensor):
                    yield kind, path + name, tensor
