"""What could be changed: each family looks at the survey and answers with proposals, or with the reason why it has none.

A proposal says the change in the user's words and where it goes; its patch is how a trial makes the same change without touching the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sonde.errors import SondeError
from sonde.tuning.messages import Loader, Place, Survey


@dataclass(frozen=True, slots=True)
class Patch:
    """What a trial changes. Loaders and optimizers go by the line that makes them."""

    loaders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optimizers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: tuple[str, ...] = ()  # of "channels_last", "autocast", "compile"
    threads: int = 0  # 0: as the script has it

    def __or__(self, other: Patch) -> Patch:
        return Patch(
            {key: {**self.loaders.get(key, {}), **other.loaders.get(key, {})} for key in (*self.loaders, *other.loaders)},
            {key: {**self.optimizers.get(key, {}), **other.optimizers.get(key, {})} for key in (*self.optimizers, *other.optimizers)},
            tuple(dict.fromkeys((*self.models, *other.models))),
            other.threads or self.threads,
        )

    @property
    def num_workers(self) -> int:
        return max((change.get("num_workers", 0) for change in self.loaders.values()), default=0)


@dataclass(frozen=True, slots=True)
class Proposal:
    family: str
    name: str  # short, unique: "workers=2"
    change: str  # in the user's words: "DataLoader(…, num_workers=2)"
    place: Place
    patch: Patch
    same_training: bool = True  # False: other batches, so the losses cannot be compared
    slow_start: bool = False
    note: str = ""


Answer = Sequence[Proposal] | str


def workers(survey: Survey) -> Answer:
    """Batches made by other processes while the model computes."""
    loaders = survey.feeding
    if not loaders:
        return "no DataLoader feeds the training"
    loaders = tuple(loader for loader in loaders if not loader.is_iterable)
    if not loaders:
        return "the dataset is iterable: with workers each would yield all of it, unless it shares the work out by itself"
    now = loaders[0].num_workers
    numbers = [number for number in _up_to(max(survey.num_cores, 2)) if number != now]
    found = []
    for number in (*((0,) if now else ()), *numbers):
        change: dict[str, Any] = {"num_workers": number}
        words = f"num_workers={number}"
        if number == 0:  # what only makes sense with workers has to go too
            change |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None}
        elif any(loader.num_epochs > 1 and not loader.is_persistent for loader in loaders):
            change["persistent_workers"] = True
            words += ", persistent_workers=True"
        found.append(_loader_proposal("workers", f"workers={number}", words, loaders, change))
    return found


def pin_memory(survey: Survey) -> Answer:
    """Batches in memory that a device can copy from by itself."""
    if survey.is_on_cpu:
        return "nothing is on an accelerator"
    loaders = tuple(loader for loader in survey.feeding if not loader.pin_memory)
    if not loaders:
        return "every DataLoader that feeds the training has it already" if survey.feeding else "no DataLoader feeds the training"
    return [_loader_proposal("pin", "pin_memory", "pin_memory=True", loaders, {"pin_memory": True})]


def optimizer(survey: Survey) -> Answer:
    """All parameters updated by a few calls instead of a loop over them."""
    if not survey.optimizers:
        return "no optimizer of torch.optim steps"
    found = []
    for way, less in (("foreach", ("loop",)), ("fused", ("loop", "foreach"))):
        takers = [each for each in survey.optimizers if way in each.takes and each.way in less]
        if takers:
            # The two exclude each other, so the other one has to be out of the way even where the user asked for it.
            change = {way: True, ("foreach" if way == "fused" else "fused"): None}
            patch = Patch(optimizers={each.place.key: {k: v for k, v in change.items() if k in each.takes} for each in takers})
            names = " and ".join(dict.fromkeys(each.name for each in takers))
            found.append(Proposal("optimizer", way, f"{names}(…, {way}=True)", takers[0].place, patch))
    if not found:
        return "the optimizer is fused already" if any(each.way == "fused" for each in survey.optimizers) else "it takes neither"
    return found


def threads(survey: Survey) -> Answer:
    """Threads inside of an operation: more is not always faster."""
    if not survey.is_on_cpu:
        return "the work is done on an accelerator"
    numbers = sorted({1, *_up_to(survey.num_cores)} - {survey.num_threads})
    if not numbers:
        return "there is one core"
    place = survey.threads_set_at if survey.threads_set_at.key else Place("", "at the top", "")
    return [
        Proposal("threads", f"threads={number}", f"torch.set_num_threads({number})", place, Patch(threads=number)) for number in numbers
    ]


def channels_last(survey: Survey) -> Answer:
    """Images stored pixel by pixel, as the convolutions of most libraries want them."""
    models = [model for model in survey.models if model.takes_images and model.num_conv2d]
    if not models:
        return "no model takes images (4-D inputs) into Conv2d"
    if all(model.is_channels_last for model in models):
        return "the images are stored so already"
    name = models[0].name
    words = f"{name}.to(memory_format=torch.channels_last)"
    note = f"what {name} is called with as well: x.to(memory_format=torch.channels_last)"
    return [Proposal("channels_last", "channels_last", words, models[0].place, Patch(models=("channels_last",)), note=note)]


def autocast(survey: Survey) -> Answer:
    """Matrix products in bfloat16; parameters, sums and the loss stay float32."""
    if not survey.models:
        return NO_MODEL
    if any(model.in_autocast for model in survey.models):
        return "the script uses autocast already"
    if not all(model.is_float32 for model in survey.models):
        return "the parameters are not float32"
    model = survey.models[0]
    words = f'with torch.autocast("{model.device}", torch.bfloat16): {model.name}(…)'
    note = "around the model's call and the loss"
    return [Proposal("autocast", "bfloat16", words, model.place, Patch(models=("autocast",)), note=note)]


def compile_model(survey: Survey) -> Answer:
    """The model turned into a few generated kernels."""
    if not survey.models:
        return NO_MODEL
    if any(model.is_compiled for model in survey.models):
        return "the model is compiled already"
    if survey.is_on_cpu and not survey.has_compiler:
        return "torch.compile needs a C++ compiler, and none is installed"
    model = survey.models[0]
    words = f"{model.name} = torch.compile({model.name})"
    note = "after it is made; the keys of its state_dict then begin with _orig_mod."
    return [Proposal("compile", "compile", words, model.place, Patch(models=("compile",)), slow_start=True, note=note)]


def batch_size(survey: Survey) -> Answer:
    """More samples per step: compared by samples per second, and another training."""
    loaders = tuple(loader for loader in survey.feeding if loader.batch_size is not None)
    if not loaders:
        return "no DataLoader with a batch_size feeds the training"
    note = "fewer updates per epoch: the learning rate may have to follow"
    found = []
    for factor in (2, 4):
        patch = Patch(loaders={loader.place.key: {"batch_size": factor * (loader.batch_size or 1)} for loader in loaders})
        words = f"batch_size={factor * (loaders[0].batch_size or 1)}"
        found.append(Proposal("batch", words, f"DataLoader(…, {words})", loaders[0].place, patch, same_training=False, note=note))
    return found


NO_MODEL = "no module with parameters was called in the training"

# From what is tried in seconds to what takes minutes.
FAMILIES: Mapping[str, Callable[[Survey], Answer]] = {
    "workers": workers,
    "optimizer": optimizer,
    "threads": threads,
    "pin": pin_memory,
    "channels_last": channels_last,
    "autocast": autocast,
    "batch": batch_size,
    "compile": compile_model,
}


def chosen_families(only: Sequence[str]) -> tuple[str, ...]:
    """The families that were asked for, in their order; all where none was."""
    for name in only:
        if name not in FAMILIES:
            near = difflib.get_close_matches(name, FAMILIES, n=1)
            hint = f"Nearest: {near[0]}. " if near else ""
            raise SondeError(f"there is nothing to tune by the name of {name!r}.\n{hint}All: {', '.join(FAMILIES)}")
    return tuple(name for name in FAMILIES if not only or name in only)


def propose(survey: Survey, families: Sequence[str]) -> tuple[list[Proposal], dict[str, str]]:
    """What to try on this script, and for each family that has nothing to propose, why."""
    found: list[Proposal] = []
    why_not: dict[str, str] = {}
    for family in families:
        answer = FAMILIES[family](survey)
        if isinstance(answer, str):
            why_not[family] = answer
        else:
            found.extend(answer)
    return found, why_not


def _loader_proposal(family: str, name: str, words: str, loaders: Sequence[Loader], change: Mapping[str, Any]) -> Proposal:
    patch = Patch(loaders={loader.place.key: change for loader in loaders})
    return Proposal(family, name, f"DataLoader(…, {words})", loaders[0].place, patch)


def _up_to(num_cores: int) -> list[int]:
    """At most three numbers that are worth trying on so many cores."""
    return sorted({max(num_cores // 4, 1), max(num_cores // 2, 1), num_cores})
