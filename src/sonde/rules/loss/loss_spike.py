"""The loss jumps far above its usual range, and the samples that cause it.

What it finds    a step whose loss is many times what it was in the steps before: a mislabeled or damaged sample, a batch in other units, a
                 learning rate that was raised too fast.
Why it matters   one such batch can undo hours of training, and it comes again in every epoch.
How it knows     the loss leaves the range of the last 64 by ten times its width, grows by half, and undoes a quarter of what was learned.
                 Before backward the step is replayed without parts of its batch, which names the samples and where they differ.
Known problems   a spike that passes is an info. It is a warning if samples cause it three times or more, and an error if the loss never
                 came back. When a task changes or a learning rate restarts, no sample is the cause. On a device there is no replay.
Fix              inspect the samples that are named; clip gradients, so that one batch cannot undo the training.
"""

from functools import partial

from sonde.rules._shared.build_spike_finding import CONSEQUENCES_OF_SPIKES, check_spikes
from sonde.rules._shared.unowned_parameters import OBSERVED
from sonde.rules.rule import Rule

RULE = Rule(
    "loss-spike",
    partial(check_spikes, rule="loss-spike", what="loss"),
    page=__doc__,
    explains=("gradient-spike", *CONSEQUENCES_OF_SPIKES),
    reductions=(OBSERVED,),
)
