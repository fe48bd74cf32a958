"""The training data come in the order of their labels.

What it finds    sorted data that are not shuffled: batches in a row hold one class, or two at the border between classes.
Why it matters   each part of an epoch pulls the model towards one class and away from the others, and batch norm gets one class at a time.
How it knows     each inspected batch is in order and has far fewer different labels than a random batch, batches in a row continue with the
                 same label or the next, and the labels return in the next epoch or the DataLoader does not shuffle.
Known problems   a curriculum is sorted by something else than the label; tasks in turn do not return; samplers that put a few classes into
                 each batch jump between classes. Data sorted by time with long-lasting labels look the same, and mostly are a defect too.
Fix              DataLoader(..., shuffle=True), or a permutation of the samples at the start of each epoch.
"""

from collections import Counter

import numpy as np

from sonde.events import Severity
from sonde.formatting import number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.dataloader_and_labels import BatchLabels, LabelCounts

ENOUGH = 8  # batches that were inspected
FEWEST = 4  # labels in a batch: fewer are in order by chance
IN_ORDER = 0.9  # of the batches; the last of an epoch and the first of the next may be one
FEW = 0.5  # of the different labels beyond the first that chance would give: shuffled batches have 0.9 to 1.1
SEVERAL = 1.5  # different labels by chance: if nearly all are of one class, single batches have no other, shuffled or not
CONTINUES = 0.8  # of the batches in a row have the same label or (of more than two) the next; some meet at the end of an epoch


def check(view: RunView) -> Result:
    labels = view.inspected_batches.labels
    labels = labels.where((labels.num >= FEWEST) & (labels.num_classes >= 2) & labels.is_per_sample)
    loader = view.training_loader
    num, num_in_order = len(labels), int(np.count_nonzero(labels.is_in_order))
    if not num:
        return NotEvaluated("no class labels were found: no observed step ended in a cross entropy of a model's output")
    if loader.order == "random" or num_in_order < IN_ORDER * num:
        return Clear()
    if num < ENOUGH:
        return NotEvaluated(f"only {num} batches with labels were inspected")
    counts = LabelCounts.of(labels)
    if len(counts.totals) < 2:
        return NotEvaluated("all labels of the inspected batches are one class")
    size = Counter(labels.num.tolist()).most_common(1)[0][0]
    distinct = float(labels.num_distinct.mean())
    distinct_by_chance = sum(1 - (1 - share) ** size for share in counts.shares())
    if distinct_by_chance < SEVERAL or distinct - 1 > FEW * (distinct_by_chance - 1):
        return Clear()
    if not _continue_in_order(view, labels, has_two=len(counts.totals) == 2):
        return Clear()
    if loader.order != "sequential" and not _labels_return(labels):
        return NotEvaluated("the labels come in order, but none of them has come back yet")
    action = "does not shuffle" if loader.order == "sequential" else "returns them"
    return RULE.finding(
        Severity.WARNING,
        view.step_number(int(labels.rows[0])),
        cause=f"the labels come sorted: a batch of {size} has {number(distinct)} class{'es' * (distinct != 1)}, where chance gives "
        f"{number(distinct_by_chance)}, and {num_in_order} of {num} batches are in order"
        + (f"; the DataLoader{loader.at} {action}" if loader.site else view.call_sites.at("forward")),
        fix="shuffle the training data: DataLoader(..., shuffle=True), or a new permutation in each epoch",
        evidence={
            "num_looked_at": num, "in_order": num_in_order, "distinct": distinct, "distinct_by_chance": distinct_by_chance,
            "num_labels_seen": len(counts.totals), **(loader.evidence() or view.call_sites.evidence("forward")),
        },
    )  # fmt: skip


def _continue_in_order(view: RunView, labels: BatchLabels, *, has_two: bool) -> bool:
    """Of the batches in two steps in a row, the second has a label of the first or the next label."""
    steps = [view.step_number(row) for row in labels.rows.tolist()]
    adjacent = [at for at in range(1, len(steps)) if steps[at] == steps[at - 1] + 1]
    num_continued = 0
    for at in adjacent:
        before, now = labels.counts[at - 1][:, 0], labels.counts[at][:, 0]
        num_continued += bool(np.isin(now, before).any())
        # Of two classes one is always next to the other: a discriminator gets real samples in one step and generated ones in the next.
        num_continued += not has_two and bool(now.min() - before.max() == 1 or before.min() - now.max() == 1)
    return num_continued >= CONTINUES * len(adjacent)


def _labels_return(labels: BatchLabels) -> bool:
    """A label comes again after a batch without it."""
    present: set[int] = set()
    gone: set[int] = set()
    for counts in labels.counts:
        now = set(counts[:, 0].tolist())
        if now & gone:
            return True
        gone |= present - now
        present = now
    return False


RULE = Rule("no-shuffle", check, page=__doc__, explains=("dead-relu", "exploding-gradient", "loss-plateau", "loss-spike", "gradient-spike"))
