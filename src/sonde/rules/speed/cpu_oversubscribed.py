"""torch computes with more threads than there are cores.

What it finds    torch.set_num_threads, OMP_NUM_THREADS or a default that counts cores which this process may not use (a container's quota).
Why it matters   the threads of one operation wait for each other; with more threads than cores one of them always waits for a core.
How it knows     the threads of torch, and the cores that this process may run on (affinity and quota). Preemptions are given as evidence.
Known problems   workers of a DataLoader use one thread each and are not counted, nor are other programs. The gain depends on the
                 operations: on two cores with 8 and 16 threads steps took 2 to 10 times as long; less than half of that is promised.
Fix              use as many threads as there are cores.
"""

from sonde.formatting import number
from sonde.rules._shared.profiled_steps import last_machine, severity_of, step_profiles, too_many_threads, with_gain
from sonde.rules._shared.read_event_tables import amount
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

MOST_GAIN = 0.4  # promised, however many threads there are


def check(view: RunView) -> Result:
    times, profiles = view.times, step_profiles(view)
    machine = last_machine(profiles)
    if reason := times.reason_not_evaluated or ("" if machine else "no step was profiled"):
        return NotEvaluated(reason)
    if not too_many_threads(machine):
        return Clear()
    threads, cores = amount(machine, "threads"), amount(machine, "cores")
    gain = min(MOST_GAIN, (1 - max(cores, 1) / threads) / 2) * times.share("forward", "backward", "optimizer")
    if not times.is_worth(gain):
        return Clear()
    preempted = amount(machine, "pushed_off_per_s")
    fitting = max(int(cores), 1)
    return RULE.finding(
        severity_of(gain),
        profiles[0].step,
        cause=f"torch computes with {number(threads)} threads on {number(cores)} cores; the process was preempted "
        f"{number(preempted)} times per second",
        fix=with_gain(f"call torch.set_num_threads({fitting}), or set OMP_NUM_THREADS={fitting}", gain),
        evidence={"gain": gain, "threads": threads, "cores": cores, "pushed_off_per_s": preempted, "load": amount(machine, "load")},
    )


RULE = Rule("cpu-oversubscribed", check, page=__doc__, explains=("slow-layer", "unfused-optimizer"))
