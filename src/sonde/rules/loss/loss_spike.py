"""The loss jumps far above its usual range, and the samples that cause it.

What it finds    a step whose loss is many times what it was in the steps before: a mislabeled or damaged sample, a batch in other units, a
                 learning rate that was raised too fast.
Why it matters   one such batch can undo hours of training, and it comes again in every epoch.
How it knows     a loss is a spike if it leaves the range of the last 64 by ten times the width of that range, grows by half, and undoes a
                 quarter of what has been learned. Before backward the step is replayed without parts of its batch: the samples without
                 which the loss is usual are named, and the input, target or layer in which they differ from the others.
Known problems   a spike that passes is only mentioned. It is a warning if samples of the data cause it three times or more, and an error if
                 they caused it and the loss never came back. If a task changes or a learning rate restarts, no sample is the cause, and it
                 stays a mention. Losses on a device are only known later: then the step cannot be replayed.
Fix              inspect the samples that are named; clip gradients, so that one batch cannot undo the training.
"""

from __future__ import annotations

from functools import partial

from sonde.rules._shared.spike_text import CONSEQUENCES_OF_SPIKES, check_spikes
from sonde.rules.rule import Rule

RULE = Rule(
    "loss-spike",
    partial(check_spikes, rule="loss-spike", what="loss"),
    page=__doc__,
    explains=("gradient-spike", *CONSEQUENCES_OF_SPIKES),
)
