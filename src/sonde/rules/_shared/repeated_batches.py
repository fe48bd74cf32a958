"""Whether a DataLoader returns the same batches again, by the hashes of their contents."""

from dataclasses import dataclass, field

import numpy as np

from sonde.events import Kind
from sonde.run_view import Block, Reduction, RunView


@dataclass(slots=True)
class BatchContents:
    """The batches of a DataLoader in observed steps."""

    rows: list[int] = field(default_factory=list)  # of the steps
    hashes: list[int] = field(default_factory=list)  # of all tensors of the batch
    sizes: list[float] = field(default_factory=list)  # samples


def _add_block(block: Block, contents: BatchContents) -> BatchContents:
    table = block[Kind.BATCH]
    columns = [column for column, site in enumerate(table.sites) if site is not None and site.path.startswith("batch.")]
    if columns:
        hashes = table["hash"][:, columns]
        is_known = ~np.isnan(hashes).any(axis=1)
        contents.rows += block.rows[is_known].tolist()
        contents.hashes += [hash(tuple(tensors)) for tensors in hashes[is_known].tolist()]
        contents.sizes += table["size"][is_known, columns[0]].tolist()
    return contents


BATCH_CONTENTS = Reduction(kinds=(Kind.BATCH,), initial=BatchContents, reduce=_add_block)


@dataclass(frozen=True, slots=True)
class RepeatedBatches:
    """How many batches were compared, and how many of them are equal."""

    num: int = 0
    num_like_first: int = 0
    num_adjacent: int = 0  # pairs of batches in two steps in a row
    num_alike: int = 0  # of these, with the same content in both
    first_step: int = -1
    last_step: int = -1
    size: int = 0  # samples of the first batch


def repeated_batches(view: RunView) -> RepeatedBatches:
    """Of the steps that train on a single batch of a DataLoader.

    A step with several batches may begin an epoch each time, or take them from several loaders.
    """
    contents, inspected = view.reduced(BATCH_CONTENTS), view.inspected_batches
    has_one_batch = np.zeros(view.num_steps + 1, bool)  # the last entry: events after the last complete step
    has_one_batch[inspected.rows[inspected.num_fetched == 1]] = True
    has_one_batch[:-1] &= view.counts("backwards") <= 1
    rows = np.array(contents.rows, np.int64)
    is_used = has_one_batch[rows]
    if not is_used.any():
        return RepeatedBatches()
    steps, hashes = view.step_numbers[rows[is_used]], np.array(contents.hashes, np.int64)[is_used]
    is_adjacent = np.diff(steps) == 1
    return RepeatedBatches(
        num=len(steps),
        num_like_first=int(np.count_nonzero(hashes == hashes[0])),
        num_adjacent=int(np.count_nonzero(is_adjacent)),
        num_alike=int(np.count_nonzero(is_adjacent & (np.diff(hashes) == 0))),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        size=int(np.array(contents.sizes)[is_used][0]),
    )
