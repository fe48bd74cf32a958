"""The autograd graphs of earlier steps stay alive: a loss or an output is stored together with the graph that made it.

What it finds    `total += loss`, a list of losses or outputs, a hook or an attribute that keeps a tensor with its graph in every step.
Why it matters   each stored tensor keeps the graph of its step: memory grows with every step until there is none left.
How it knows     the graphs of many observed steps are still alive; then the tensors that stay are counted, and what holds them is searched.
Known problems   deque(maxlen=…) is no leak, and truncated backpropagation keeps one graph. A list that is emptied after every epoch is
                 found only if an epoch has more than some forty steps.
Fix              store numbers: loss.item(), output.detach().
"""

import numpy as np

from sonde.events import Severity
from sonde.formatting import size
from sonde.rules._shared.leak_events import found_leaks
from sonde.rules.column_helpers import largest_number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

ENOUGH = 8  # observed steps in which live graphs were counted


def check(view: RunView) -> Result:
    graphs_alive = view.steps["kept_graphs"]
    leak = next((leak for leak in found_leaks(view) if leak.num_nodes), None)
    if leak is None:
        is_known = np.count_nonzero(~np.isnan(graphs_alive)) >= ENOUGH
        return Clear() if is_known else NotEvaluated(f"live autograd graphs were counted in fewer than {ENOUGH} steps")
    return RULE.finding(
        Severity.WARNING,
        leak.step,
        cause=leak.cause,
        fix=leak.fix,
        evidence={
            "holder": leak.holder,
            "graph_nodes": leak.num_nodes,
            **({"kept": size(leak.num_bytes)} if leak.num_bytes else {}),  # a graph of scalars holds nearly nothing
            "graphs_alive": float(np.fmax(largest_number(graphs_alive), 0.0)),
            **source_evidence(leak.line, leak.line_text),
        },
    )


RULE = Rule("graph-leak", check, page=__doc__, explains=("memory-growth", "out-of-memory"))
