"""The training waits for its data.

What it finds    a DataLoader that delivers batches more slowly than the model could use them.
Why it matters   while the loop waits, nothing is computed: the same training could be done in a part of the time.
How it knows     the median time from asking a DataLoader for a batch to getting it, compared with the rest of the step; a profiled step
                 shows whether loading computes or waits. With n workers a step takes the longer of the computing and an n-th of the
                 loading; workers that compute need free cores.
Known problems   data that is made in the loop without a DataLoader may be python-bound. Workers that start anew in every epoch (no
                 persistent_workers) are counted here too. pin_memory matters on a device only.
Fix              give the DataLoader workers (num_workers), keep them (persistent_workers=True), or do per-sample work before the training.
"""

from collections.abc import Sequence
from math import ceil
from statistics import median

from sonde.events import StepProfile
from sonde.formatting import number
from sonde.rules._shared.profiled_steps import last_machine, severity_of, step_profiles, with_gain
from sonde.rules._shared.read_event_tables import count
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

FEWEST_WORKERS = 2  # proposed: a single one delivers irregularly
COMPUTES = 0.5  # share of the loading that is computing, from which on workers need cores
OVERLAP = 0.8  # of the ideal gain is promised: batches still have to be transferred from the workers
RESTARTS = 0.5  # share of the data time that comes in single long waits: then starting workers is what costs


def check(view: RunView) -> Result:
    times, profiles, loader = view.times, step_profiles(view), view.training_loader
    if reason := times.reason_not_evaluated:
        return NotEvaluated(reason)
    share, data_ms = times.share("data"), times.usual_ms("data")
    rest_ms = max(times.usual_ms() - data_ms, 1e-6)
    computing_share = _computing_share(profiles)
    is_restarted = loader.num_workers and not (loader.site and loader.site.persistent_workers)
    if is_restarted and data_ms * times.num < (1 - RESTARTS) * times.totals["data"]:
        wanted, gain = loader.num_workers, OVERLAP * share
        advice = "keep the workers from epoch to epoch: DataLoader(..., persistent_workers=True)"
    else:
        cores = count(last_machine(profiles), "cores") or 1
        wanted, step_ms = _with_more_workers(loader.num_workers, data_ms, rest_ms, cores, computing_share >= COMPUTES)
        gain = OVERLAP * max(0.0, 1 - step_ms / (data_ms + rest_ms)) * times.training_share
        advice = f"load in parallel: DataLoader(..., num_workers={wanted}, persistent_workers=True)"
        if computing_share >= COMPUTES:
            advice += ", or compute once, before the training, what is the same in every epoch"
    if not times.is_worth(gain):
        return Clear()
    of_loader = f" of the DataLoader{loader.at}" if loader.at else ""
    workers = f"{loader.num_workers} workers" if loader.num_workers else "no workers: it loads in the process that trains (num_workers=0)"
    return RULE.finding(
        severity_of(gain),
        times.first_step,
        cause=f"the training waits {100 * share:.0f} % of the time for data{of_loader}: {number(data_ms)} ms of a usual step, "
        f"compared with {number(rest_ms)} ms for everything else; the DataLoader has {workers}",
        fix=with_gain(advice, gain),
        evidence={
            "gain": gain,
            "data_share": share,
            "data_ms": data_ms,
            "rest_ms": rest_ms,
            "num_workers": loader.num_workers,
            "wanted_workers": wanted,
            **({"loading_computes_share": computing_share} if profiles else {}),
            **loader.evidence(),
        },
    )


def _computing_share(profiles: Sequence[StepProfile]) -> float:
    """Share of the loading in which a core was used."""
    shares = [max(0.0, profile.fetch_cpu_ms) / profile.fetch_ms for profile in profiles if profile.fetch_ms > 0]
    return median(shares) if shares else 1.0


def _with_more_workers(workers: int, data_ms: float, rest_ms: float, cores: int, computes: bool) -> tuple[int, float]:
    """How many workers are needed, and how long a step takes with them."""
    # With workers the wait is what is left of the loading after the rest of the step; each worker takes so long for a batch:
    loading_ms = workers * (data_ms + rest_ms) if workers else data_ms
    # Workers that compute need cores, and the training needs one; those that wait do not, but torch warns of more workers than cores.
    most = cores - 1 if workers or computes else max(cores, FEWEST_WORKERS)
    wanted = ceil(min(max(1.25 * loading_ms / rest_ms, FEWEST_WORKERS), most))
    return (wanted, max(rest_ms, loading_ms / wanted)) if wanted > workers else (workers, data_ms + rest_ms)


RULE = Rule("input-bound", check, page=__doc__, explains=("python-bound", "slow-step-outliers"))
