"""Every step trains on the same batch, although the DataLoader has more.

What it finds    a DataLoader that is restarted in every step without shuffling, as in next(iter(loader)): it returns its first batch
                 forever. So does a break after the first batch of each epoch.
Why it matters   the model memorizes a few samples: the loss falls fast, and nothing else is learned.
How it knows     the hash of the batch is the same in every inspected step, among them steps in a row, and the loader has several batches.
Known problems   a batch that is taken out of the loader once is a deliberate check and not reported, nor is a loader with a single batch.
                 With augmentation or shuffle=True the batches differ. Batches without a DataLoader are not evaluated, nor are steps with
                 several.
Fix              iterate over the loader: for x, y in loader; or keep one iterator and call next() on it.
"""

from sonde.events import Severity
from sonde.rules._shared.repeated_batches import BATCH_CONTENTS, repeated_batches
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

ENOUGH = 8  # batches: a check of the first steps is no training
ADJACENT = 2  # pairs of steps in a row: at a fixed distance, a batch that comes once in an epoch could be the same each time


def check(view: RunView) -> Result:
    batches, loader = view.remember(repeated_batches), view.training_loader
    if not batches.num:
        return NotEvaluated("no batch of a DataLoader was inspected")
    if batches.num_like_first < batches.num:
        return Clear()
    if not loader.num_batches:
        return NotEvaluated("how many batches the DataLoader has is not known")
    if loader.num_batches == 1:
        return Clear()
    if batches.num < ENOUGH or batches.num_adjacent < ADJACENT:
        return NotEvaluated(f"only {batches.num} batches were inspected, {batches.num_adjacent} right after another one")
    return RULE.finding(
        Severity.ERROR,
        batches.first_step,
        cause=f"the DataLoader{loader.at} has {loader.num_batches} batches, and all {batches.num} that were inspected, from step "
        f"{batches.first_step} to step {batches.last_step}, were the same {batches.size} samples",
        fix="continue one iterator: for x, y in loader, without a break after its first batch; or it = iter(loader) before the loop, "
        "and next(it) in it",
        evidence={
            "num_looked_at": batches.num, "num_adjacent": batches.num_adjacent, "num_batches": loader.num_batches,
            "batch_size": batches.size, **loader.evidence(),
        },
    )  # fmt: skip


RULE = Rule(
    "same-batch",
    check,
    page=__doc__,
    explains=("label-constant", "no-shuffle", "loss-plateau", "vanishing-gradient", "dead-relu"),
    reductions=(BATCH_CONTENTS,),
)
