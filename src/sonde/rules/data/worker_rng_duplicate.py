"""The workers of a DataLoader draw the same random numbers.

What it finds    a dataset, a transform in it or a collate_fn that draws from a random generator of its own or of its module (rng =
                 np.random.default_rng(0)), or a worker_init_fn that seeds a global one with the same number in every worker.
Why it matters   every worker gets a copy in the same state: with four workers each augmentation comes four times, and often again in every
                 epoch.
How it knows     a DataLoader with several workers was started, and the code that loads a sample (which is read, not executed) draws from
                 such a generator. PyTorch seeds the global generators of torch, random and numpy differently in each worker.
Known problems   a generator that is used before the workers start does not count. Code that reads its worker (get_worker_info,
                 torch.initial_seed), or a worker_init_fn that changes the dataset or the generator, is assumed to be correct. Draws in
                 libraries are not found.
Fix              create the generator in the worker: seed it from torch.initial_seed(), or use the global generator.
"""

from sonde.events import CallSiteFound, Severity
from sonde.formatting import listing
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

GLOBAL = {"numpy": "np.random", "torch": "torch's generator", "random": "the random module"}


def check(view: RunView) -> Result:
    # The generators are searched only in loaders with two or more workers.
    loaders = [each for each in view.events_with_rows(CallSiteFound) if each[1].copied_generators is not None]
    if not loaders:
        return NotEvaluated("no DataLoader with several workers was started")
    suspect = next(((row, site) for row, site in loaders if site.copied_generators or site.copied_globals or site.seeded_alike), None)
    if suspect is None:
        return Clear()
    row, loader = suspect
    held, outside, alike = (list(names or ()) for names in (loader.copied_generators, loader.copied_globals, loader.seeded_alike))
    if held:
        reason = f"each gets a copy of {listing(held)} of the {loader.dataset or 'dataset'}"
    elif outside:
        reason = f"each gets a copy of the generator {listing(outside)}"
    else:
        reason = f"worker_init_fn seeds {listing([GLOBAL.get(name, name) for name in alike])} with the same number in each"
    at = f" at {loader.line}" if loader.line else ""
    return RULE.finding(
        Severity.WARNING,
        view.step_number(row),
        cause=f"the {loader.num_workers or 0} workers of the DataLoader{at} draw the same random numbers: {reason}"
        + ("" if loader.persistent_workers else ", and again in every epoch"),
        fix="create the generator inside of the worker, seeded from torch.initial_seed() (it differs in each worker and epoch)"
        if held or outside
        else "leave the seeding to PyTorch, which does it for each worker, or seed from torch.initial_seed() % 2**32",
        evidence={
            "num_workers": loader.num_workers or 0, "generators": listing(held + outside or alike),
            **source_evidence(loader.line, loader.text),
        },
    )  # fmt: skip


RULE = Rule("worker-rng-duplicate", check, page=__doc__)
