"""Every worker of a DataLoader delivers the whole stream.

What it finds    an IterableDataset that does not divide its samples among the workers: each sample comes once per worker.
Why it matters   an epoch is as many times longer as there are workers, and several updates in a row use the same samples.
How it knows     an iterable dataset has several workers, no code of it reads the worker id, and batches in a row were the same.
Known problems   a stream that draws at random gives different batches in each worker and is not reported.
Fix              in __iter__, call torch.utils.data.get_worker_info() and yield every num_workers-th sample, beginning with id.
"""

from sonde.events import Severity
from sonde.rules._shared.repeated_batches import BATCH_CONTENTS, repeated_batches
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

LEAST = 0.25  # of the steps in a row: two workers in turn give one pair in two, and some pairs are lost between epochs
PAIRS = 2  # steps in a row


def check(view: RunView) -> Result:
    loader = view.training_loader
    if loader.site is None or loader.order != "stream" or loader.num_workers < 2:
        return NotEvaluated("no IterableDataset was loaded by several workers")
    if loader.site.is_worker_aware:
        return Clear()
    batches = view.remember(repeated_batches)
    if batches.num_adjacent < PAIRS:
        return NotEvaluated(f"only {batches.num_adjacent} batches were inspected right after another one")
    if batches.num_alike < LEAST * batches.num_adjacent or batches.num_alike == 0:
        return Clear()
    return RULE.finding(
        Severity.WARNING,
        batches.first_step,
        cause=f"the {loader.num_workers} workers of the DataLoader{loader.at} each return the whole "
        f"{loader.site.dataset or 'dataset'}: {batches.num_alike} of {batches.num_adjacent} batches were a copy of the one before",
        fix="divide the samples in __iter__: islice(samples, info.id, None, info.num_workers) with info = get_worker_info()",
        evidence={
            "num_workers": loader.num_workers, "num_alike": batches.num_alike, "num_adjacent": batches.num_adjacent,
            **loader.evidence(),
        },
    )  # fmt: skip


RULE = Rule("iterable-duplicated", check, page=__doc__, explains=("same-batch",), reductions=(BATCH_CONTENTS,))
