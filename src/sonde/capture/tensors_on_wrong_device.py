"""Finds tensors of a model on another device than the model: `model.to(device)` moves parameters and buffers, not plain attributes.

Tested with the model on the meta device, not with a real accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sonde.statistics.private_torch_api import storage_address

MAX_REPORTED = 20  # tensors of one model


def find_left_behind(model: nn.Module) -> list[dict[str, Any]]:
    """Tensors on the CPU while most of the model is on a device. Scalars are omitted: kernels take them by value."""
    devices = Counter(parameter.device.type for parameter in model.parameters())
    if not devices or set(devices) == {"cpu"}:
        return []
    main_device = devices.most_common(1)[0][0]
    if main_device == "cpu":
        return []  # only a part is on a device, on purpose
    found: list[dict[str, Any]] = []
    for kind, path, tensor in _tensors(model):
        if tensor.device.type == "cpu" and tensor.dim():
            found.append({"kind": kind, "path": path, "num_elements": tensor.numel(), "device": "cpu", "model_on": main_device})
            if len(found) == MAX_REPORTED:
                break
    return found


def find_holders(models: Iterable[nn.Module], storages: set[int]) -> dict[int, str]:
    """The storages, by address, that belong to a model, with the path of the tensor."""
    if not storages:
        return {}
    held: dict[int, str] = {}
    for model in models:
        for _, path, tensor in _tensors(model):
            if tensor.layout is torch.strided and (address := storage_address(tensor.untyped_storage())) in storages:
                held.setdefault(address, path)
    return held


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        held = (("parameter", module._parameters), ("buffer", module._buffers), ("attribute", vars(module)))
        for kind, tensors in held:
            for name, tensor in list(tensors.items()):
                if isinstance(tensor, torch.Tensor):
                    yield kind, path + name, tensor
