"""Reads the class labels of a loss from its autograd graph, before backward frees it.

Only the losses of torch (cross entropy, nll, binary cross entropy) save their labels. They count as classes only if the loss compares them
with an output of the model: the columns of a contrastive loss are other samples.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.find_tensors import numpy_view, shape_of
from sonde.statistics.private_torch_api import saved_value_handle

MAX_NODES = 32  # from the loss back: the node is near, behind a scale, a mean or a sum with other losses
MAX_LABELS = 1 << 13  # per batch, evenly spaced
MAX_REPORTED = 64  # distinct labels in one event, the most frequent ones
MIN_LABELS = 2  # one label has no distribution
MAX_BACK = 12  # nodes between a loss and the operation that computed its scores
MAX_VIEWS = 4  # nodes between that operation and its parameter

_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")
_IN_NUMPY = (torch.float32, torch.int64, torch.uint8, torch.float64, torch.float16, torch.int32, torch.int16, torch.int8, torch.bool)
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "Embedding")  # prefixes of node names
_VIEWS = ("TBackward", "Transpose", "Permute", "ToCopy", "View", "UnsafeView", "Expand", "Alias", "Split")
_BINARY = ("BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0")


class ClassLabels(NamedTuple):
    """The labels of one loss: integers from 0 on, in the order of the batch."""

    values: npt.NDArray[np.integer[Any]]
    num_classes: int
    is_learnt: bool  # whether the scores come from a trained weight matrix with one row per class
    location: tuple[int, int]  # address in memory, and number


def find_labels(loss: Any, outputs: Sequence[tuple[int, ...]], fetched: Iterable[Tensor]) -> list[ClassLabels | None]:
    """The labels of each loss that `loss` consists of, if it was compared with one of these shapes of `outputs`; None where they cannot be
    read. Labels on a device are read from `fetched`, the tensors of the last batch, instead."""
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return []
    found: list[ClassLabels | None] = []
    nodes: list[Any] = [loss.grad_fn]
    for node in islice(nodes, MAX_NODES):
        kind = node.name()
        if kind in _CLASSES or kind in _BINARY:
            found.append(_labels_of(node, kind, outputs, fetched))
        else:
            inputs = dict.fromkeys(each for each, _ in node.next_functions if each is not None)
            nodes += [each for each in inputs if each not in nodes]
    return found


def _labels_of(node: Any, kind: str, outputs: Sequence[tuple[int, ...]], fetched: Iterable[Tensor]) -> ClassLabels | None:
    labels, scores = _saved(node, "target"), _saved(node, "self")
    if labels is None or scores is None:
        return None
    matching = [shape for shape in outputs if math.prod(shape) == scores.numel()]
    if kind in _BINARY:
        # One number and one label per sample: several would be a multi-label problem.
        num_classes, is_own = 2, any(shape[:1] == (scores.numel(),) for shape in matching)
    else:
        num_classes = shape_of(scores)[1] if scores.dim() > 1 and not scores.is_nested else 0
        is_own = any(num_classes in shape[1:] for shape in matching)
    values = _values(labels, fetched) if is_own else None
    if values is None:
        return None
    is_learnt = _is_trained(node, 1 if kind in _BINARY else num_classes)
    return ClassLabels(values, num_classes, is_learnt, (labels.data_ptr(), labels.numel()))


def _is_trained(node: Any, num_columns: int) -> bool:
    """Whether the scores are a product with a trained parameter: scores between samples (a contrastive loss) and those of a frozen
    classifier are not. Follows the graph from the loss through operations with one input."""
    for _ in range(MAX_BACK):
        previous = [each for each, _ in node.next_functions if each is not None]
        if node.name().startswith(_PRODUCTS) or len(previous) != 1:
            return any(_is_parameter(each, num_columns) for each in previous)
        node = previous[0]
    return False


def _is_parameter(node: Any, num_columns: int) -> bool:
    """Whether a node is a parameter, possibly transposed or cast, with a value for every column, which a learned temperature has not."""
    for _ in range(MAX_VIEWS):
        variable = getattr(node, "variable", None)
        if variable is not None:
            return bool(variable.numel() >= num_columns)
        if node is None or not node.name().startswith(_VIEWS):
            break
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return False


def _saved(node: Any, name: str) -> Tensor | None:
    """A saved tensor of a node, unless a hook packed it: unpacking runs the user's code, and with checkpointing the whole forward."""
    handle = saved_value_handle(node, name)
    if handle is None or getattr(handle, "unpack_hook", handle) is not None:
        return None
    tensor = handle.data
    return tensor if isinstance(tensor, Tensor) else None


def _values(labels: Tensor, fetched: Iterable[Tensor]) -> npt.NDArray[np.integer[Any]] | None:
    if on_device(labels):
        shape = shape_of(labels)
        matching = [each for each in fetched if shape_of(each) == shape and each.dtype == labels.dtype and not on_device(each)]
        if len(matching) != 1:
            return None
        labels = matching[0]
    if not is_plain(labels):
        return None
    values = numpy_view(labels).reshape(-1)
    values = values[:: len(values) // MAX_LABELS + 1]
    if values.dtype.kind in "fb":
        if not ((values == 0) | (values == 1)).all():
            return None  # soft labels
        values = values.astype(np.int64)
    labels_used: npt.NDArray[np.integer[Any]] = values[values >= 0]  # ignored labels are negative
    return labels_used


def is_plain(tensor: Tensor) -> bool:
    """Whether numpy can read the tensor without a copy."""
    if type(tensor) is not Tensor or tensor.dtype not in _IN_NUMPY or tensor.layout is not torch.strided or not tensor.is_cpu:
        return False
    try:
        return not tensor.is_neg() and not tensor.is_nested and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    except RuntimeError:  # inside of vmap the tensor has no memory
        return False


def count_labels(per_loss: Sequence[ClassLabels | None]) -> dict[str, Any] | None:
    """The `labels` field of an event for one step; None without labels, or if those of some loss are unknown."""
    known = [labels for labels in per_loss if labels is not None]
    if not known or len(known) < len(per_loss):
        return None
    found = Counter[int]()
    for labels in known:
        found.update(labels.values.tolist())  # batches are small: the overhead of numpy would be larger
    if found.total() < MIN_LABELS:
        return None
    steps = np.diff(known[0].values)
    return {
        "num": found.total(), "num_classes": max(labels.num_classes for labels in known), "num_distinct": len(found),
        "is_learnt": all(labels.is_learnt for labels in known),
        "counts": sorted([value, times] for value, times in found.most_common(MAX_REPORTED)),
        "in_order": len(known) == 1 and bool((steps >= 0).all() or (steps <= 0).all()),
    }  # fmt: skip
