"""The gradient jumps far above its usual range while the loss does not, and the samples and the layer that cause it.

What it finds    a step whose gradient norm is many times what it was in the steps before: a sample near a steep place of the loss (a root
                 at zero, a division by a small number), a value that is new to the model.
Why it matters   the update is as large as the gradient: one of them can undo a training, and the loss does not show it before.
How it knows     in logarithms, the norm leaves the range of the last 64 by four times its width, and is twenty times the usual. Before the
                 update the step is replayed without parts of its batch, which names the samples and the layer that they change most.
Known problems   gradients are judged as the optimizer gets them: a clipped one is no spike. One that passes is an info; it is a warning if
                 samples cause it three times or more, and an error if the loss never came back. Norms that jump all the time are
                 exploding-gradient.
Fix              clip gradients; inspect the samples that are named, and the arithmetic of the layer.
"""

from functools import partial

from sonde.rules._shared.build_spike_finding import CONSEQUENCES_OF_SPIKES, check_spikes
from sonde.rules._shared.unowned_parameters import OBSERVED
from sonde.rules.rule import Rule

RULE = Rule(
    "gradient-spike",
    partial(check_spikes, rule="gradient-spike", what="gradient"),
    page=__doc__,
    explains=("loss-spike", *CONSEQUENCES_OF_SPIKES),
    reductions=(OBSERVED,),
)
