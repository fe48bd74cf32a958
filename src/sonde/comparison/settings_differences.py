"""Differences of two runs in arguments, settings, models, optimizers, calls per step and environment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np

from sonde.comparison.first_divergence import key, named
from sonde.events import Event, Site
from sonde.formatting import DASH, number
from sonde.run_view import RunView
from sonde.run_view.call_counts import COUNTED
from sonde.runlog.run_reader import Run

Topic = Literal["configuration", "model", "loop", "environment"]
TOPICS = get_args(Topic)

MAX_LISTED = 200  # sites that only one run has: more are counted
# Differ between any two runs.
PASSING = frozenset(
    {"name", "started", "pid", "boot", "pid_namespace", "start_ticks", "attempt", "segment", "format", "rank", "source", "line"}
)
ENVIRONMENT = frozenset(
    {"python", "torch", "sonde", "threads", "host", "world_size", "native_kernel", "platform", "cpu", "cores", "device", "gpu", "cuda"}
)


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """One setting with different values, as text."""

    topic: Topic
    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class SiteDifferences:
    """Layers and parameters by path: which only one run has, and which have another shape."""

    num_shared: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    num_only_a: int
    num_only_b: int
    other_shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def compare_settings(runs: tuple[Run, Run], views: tuple[RunView | None, RunView | None]) -> tuple[SettingDifference, ...]:
    """In the order of `TOPICS`."""
    a, b = (_given(run, view) for run, view in zip(runs, views))
    trained = [view for view in views if view is not None and view.num_steps]
    if len(trained) == 2:
        for given, one in zip((a, b), trained):
            for place in [place for place in given if place[1].startswith("optimizer") and place[1].endswith("group lr")]:
                del given[place]  # the initial rate: the rates of the steps are compared instead
            given |= _rates(one, min(view.last_step for view in trained)) | _calls(one)
    pairs = {place: (a.get(place, DASH), b.get(place, DASH)) for place in dict.fromkeys([*a, *b])}
    different = [SettingDifference(*place, *values) for place, values in pairs.items() if values[0] != values[1]]
    return tuple(sorted(different, key=lambda one: TOPICS.index(one.topic)))


def compare_sites(a: RunView, b: RunView) -> SiteDifferences:
    left, right = _tensors(a), _tensors(b)
    only_a = [named(site) for place, site in left.items() if place not in right]
    only_b = [named(site) for place, site in right.items() if place not in left]
    shapes = [
        (named(site), site.shape, right[place].shape)
        for place, site in left.items()
        if place in right and _lasting_shape(site) != _lasting_shape(right[place])
    ]
    shared = sum(place in right for place in left)
    return SiteDifferences(
        shared, tuple(only_a[:MAX_LISTED]), tuple(only_b[:MAX_LISTED]), len(only_a), len(only_b), tuple(shapes[:MAX_LISTED])
    )


def _tensors(view: RunView) -> dict[tuple[str, str, str, int, int], Site]:
    sites = sorted(view.sites.values(), key=lambda site: site.id)
    return {key(site): site for site in sites if site.kind in ("output", "parameter")}


def _lasting_shape(site: Site) -> tuple[int, ...]:
    """The first dimension of an output is the batch, which may be of another size."""
    return site.shape[1:] if site.kind == "output" else site.shape


def _given(run: Run, view: RunView | None) -> dict[tuple[Topic, str], str]:
    given: dict[str, Any] = {}
    for source in (view.process.manifest if view else {}, run.info, *(event.data for event in _events(view, "start"))):
        given |= {str(name): value for name, value in source.items() if name not in PASSING}
    facts: dict[tuple[Topic, str], str] = {}
    argv = given.pop("argv", None)
    if isinstance(argv, list):
        facts |= {("configuration", name): text for name, text in _arguments([str(word) for word in argv]).items()}
        given.pop("script", None)  # the first of the arguments
    for name, value in _flat("", given):
        topic: Topic = "environment" if name.partition(".")[0] in ENVIRONMENT else "configuration"
        facts[topic, name] = value
    for kind in ("model", "optimizer"):
        for place, event in enumerate(_events(view, kind)):
            called = kind if place == 0 else f"{kind} {place + 1}"
            data = {name: value for name, value in event.data.items() if name not in (*PASSING, kind)}
            facts |= {("model", f"{called} {_plain_name(name)}"): value for name, value in _flat("", data)}
    for site in view.sites.values() if view else ():
        if site.kind == "input":
            facts["configuration", f"shape of {site.path}"] = f"({', '.join(map(str, site.shape))})"
    return facts


def _events(view: RunView | None, kind: str) -> Iterable[Event]:
    return list(view.process.events(kind))[:8] if view else []


def _arguments(argv: Sequence[str]) -> dict[str, str]:
    """`train.py data --lr 0.1 --fast` by name: "script", "argument 1" (data), "argument --lr" (0.1), "argument --fast" (given)."""
    named_: dict[str, str] = {}
    positional = 0
    words = list(argv[1:])
    if argv:
        named_["script"] = argv[0]
    while words:
        word = words.pop(0)
        if _is_option(word):
            name, equals, value = word.partition("=")
            if not equals and words and not _is_option(words[0]):
                value = words.pop(0)
            option = f"argument {name}"
            named_[option] = f"{named_[option]}, {value}" if option in named_ else value or "given"
        elif "=" in word.lstrip("="):
            name, _, value = word.partition("=")
            named_[f"argument {name}"] = value
        else:
            positional += 1
            named_[f"argument {positional}"] = word
    return named_


def _is_option(word: str) -> bool:
    """`--lr` or `-v`, but not `-0.1`."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-")
    return False


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    """Nested settings under dotted names, as text."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value[:16]):
            yield from _flat(f"{prefix} {place + 1}" if len(value) > 1 else prefix, item)
    elif isinstance(value, float):
        yield prefix, f"{value:.9g}" if isfinite(value) else number(value)
    else:
        yield prefix, DASH if value is None else str(value)


def _rates(view: RunView, until: int) -> dict[tuple[Topic, str], str]:
    """The learning rates at the first step and at the last step that both may have."""
    facts: dict[tuple[Topic, str], str] = {}
    for name in [name for name in view.steps if name == "lr" or name.startswith("lr:")]:
        values = view.steps[name]
        known = values[np.isfinite(values) & (view.step_numbers <= until)]
        if len(known):
            first, last = (f"{float(rate):.9g}" for rate in (known[0], known[-1]))
            facts["configuration", name] = first if (known == known[0]).all() else f"{first} at first, {last} at step {until}"
    return facts


def _calls(view: RunView) -> dict[tuple[Topic, str], str]:
    """How often a usual step calls backward, the optimizer and the like."""
    facts: dict[tuple[Topic, str], str] = {}
    for name in COUNTED:
        values = view.steps[name]
        values = values[np.isfinite(values)]
        if len(values):
            facts["loop", f"{name.replace('_', ' ')} per step"] = number(float(np.median(values)))
    return facts


def _plain_name(name: str) -> str:
    """`groups.lr` is `group lr`; the text of an event is a line of code."""
    words = name.replace("groups", "group").replace(".", " ").replace("_", " ")
    return "line" if words == "text" else words
