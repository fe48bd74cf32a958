"""The class labels that a loss was computed from, read from the graph that backward is about to walk: wherever they come from, these count.

Only a loss of torch's own (cross entropy, nll, binary cross entropy) keeps them, and only where the model's own output was compared with
them it is known that they are classes: the columns of a contrastive loss are other samples.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonde.statistics.deferred_reads import on_device
from sonde.statistics.torch_internals import saved_value_handle

MAX_NODES = 32  # from the loss on: it is near, behind a scale, a mean, a sum with other losses
MAX_LABELS = 1 << 13  # of one batch are counted, evenly spaced
MAX_REPORTED = 64  # different labels in one event, the most frequent
FEWEST = 2  # labels: one alone is always alike
MAX_BACK = 12  # nodes from a loss to what made its scores
MAX_TURNS = 4  # nodes from there to the parameter

_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")
_IN_NUMPY = (torch.float32, torch.int64, torch.uint8, torch.float64, torch.float16, torch.int32, torch.int16, torch.int8, torch.bool)
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "Embedding")  # names of nodes begin so
_TURNS = ("TBackward", "Transpose", "Permute", "ToCopy", "View", "UnsafeView", "Expand", "Alias", "Split")
_BINARY = ("BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0")


class ClassLabels(NamedTuple):
    """What one loss was given: whole numbers from 0 on, in their order."""

    values: npt.NDArray[np.integer[Any]]
    num_classes: int
    is_learnt: bool  # their columns: each is a row of weights that the training changes, the last of the model
    place: tuple[int, int]  # in memory: where they begin, and how many


def find_labels(loss: Any, outputs: Sequence[tuple[int, ...]], fetched: Iterable[Tensor]) -> list[ClassLabels | None]:
    """The labels of the losses that this one is made of, as far as a model's own output (one of these shapes) was compared with them; None
    for those that are out of reach. Those on a device are looked up in the batch that the loader handed out."""
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return []
    found: list[ClassLabels | None] = []
    queue: deque[Any] = deque([loss.grad_fn])
    seen: set[Any] = {loss.grad_fn}
    for _ in range(MAX_NODES):
        if not queue:
            break
        node = queue.popleft()
        kind = node.name()
        if kind in _CLASSES or kind in _BINARY:
            found.append(_given(node, kind, outputs, fetched))
            continue
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                queue.append(after)
    return found


def _given(node: Any, kind: str, outputs: Sequence[tuple[int, ...]], fetched: Iterable[Tensor]) -> ClassLabels | None:
    labels, scores = _saved(node, "target"), _saved(node, "self")
    if labels is None or scores is None:
        return None
    whole = [shape for shape in outputs if math.prod(shape) == scores.numel()]
    if kind in _BINARY:
        # One number per sample, and one label: several are several questions.
        num_classes, is_own = 2, any(shape[:1] == (scores.numel(),) for shape in whole)
    else:
        num_classes = scores.shape[1] if scores.dim() > 1 else 0
        is_own = any(num_classes in shape[1:] for shape in whole)
    values = _values(labels, fetched) if is_own else None
    if values is None:
        return None
    is_learnt = _is_learnt(node, 1 if kind in _BINARY else num_classes)
    return ClassLabels(values, num_classes, is_learnt, (labels.data_ptr(), labels.numel()))


def _is_learnt(node: Any, num_columns: int) -> bool:
    """From the loss back through what takes one tensor (log-softmax, views, a temperature, a cast) to what made the scores: is it a product
    with a parameter that is being trained? Scores between samples (a contrastive loss, a query and its documents) are not, nor are those
    of a frozen classifier that judges what is trained."""
    for _ in range(MAX_BACK):
        behind = [each for each, _ in node.next_functions if each is not None]
        if node.name().startswith(_PRODUCTS) or len(behind) != 1:
            return any(_is_parameter(each, num_columns) for each in behind)
        node = behind[0]
    return False


def _is_parameter(node: Any, num_columns: int) -> bool:
    """Itself, transposed, or cast by autocast; with numbers for all columns, which a learnt temperature has not."""
    for _ in range(MAX_TURNS):
        variable = getattr(node, "variable", None)
        if variable is not None:
            return bool(variable.numel() >= num_columns)
        if node is None or not node.name().startswith(_TURNS):
            break
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return False


def _saved(node: Any, name: str) -> Tensor | None:
    """What a node keeps, unless somebody packed it: unpacking runs code of the user's, and in a checkpoint the whole forward."""
    kept = saved_value_handle(node, name)
    if kept is None or getattr(kept, "unpack_hook", kept) is not None:
        return None
    tensor = kept.data
    return tensor if isinstance(tensor, Tensor) else None


def _values(labels: Tensor, fetched: Iterable[Tensor]) -> npt.NDArray[np.integer[Any]] | None:
    if on_device(labels):
        alike = [tensor for tensor in fetched if tensor.shape == labels.shape and tensor.dtype == labels.dtype and not on_device(tensor)]
        if len(alike) != 1:
            return None
        labels = alike[0]
    if not is_plain(labels):
        return None
    values = labels.detach().numpy().reshape(-1)
    values = values[:: len(values) // MAX_LABELS + 1]
    if values.dtype.kind in "fb":
        if not ((values == 0) | (values == 1)).all():
            return None  # soft labels
        values = values.astype(np.int64)
    kept: npt.NDArray[np.integer[Any]] = values[values >= 0]  # what is ignored is negative
    return kept


def is_plain(tensor: Tensor) -> bool:
    """Can numpy read it as it is?"""
    if type(tensor) is not Tensor or tensor.dtype not in _IN_NUMPY or tensor.layout is not torch.strided:
        return False
    if not tensor.is_cpu or tensor.is_neg() or tensor.is_nested:
        return False
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # inside of vmap and the like there is no memory behind it
        return False


def count_labels(given: Sequence[ClassLabels | None]) -> dict[str, Any] | None:
    """What an event says of the labels of one step; None where there are none, or not all of them are known."""
    known = [labels for labels in given if labels is not None]
    if not known or len(known) < len(given):
        return None
    found = Counter[int]()
    for labels in known:
        found.update(labels.values.tolist())  # a batch is small: numpy would take longer to begin than this takes
    if found.total() < FEWEST:
        return None
    steps = np.diff(known[0].values)
    return {
        "num": found.total(),
        "num_classes": max(labels.num_classes for labels in known),
        "num_distinct": len(found),
        "is_learnt": all(labels.is_learnt for labels in known),
        "counts": sorted([value, times] for value, times in found.most_common(MAX_REPORTED)),
        "in_order": len(known) == 1 and bool((steps >= 0).all() or (steps <= 0).all()),
    }
