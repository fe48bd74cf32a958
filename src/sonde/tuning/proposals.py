"""Proposes changes: each family of changes reads the survey and returns proposals, or the reason why it has none.

A proposal names the change as code and the line that it belongs to. Its patch makes the same change in a trial, without modifying the file.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sonde.errors import SondeError
from sonde.tuning.trial_messages import CallSite, DataLoaderInfo, Survey

Changes = Mapping[str, Mapping[str, Any]]  # arguments by the key of the call site that creates the object


def _merged(one: Changes, other: Changes) -> Changes:
    return {key: {**one.get(key, {}), **other.get(key, {})} for key in (*one, *other)}


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes of a trial."""

    loaders: Changes = field(default_factory=dict)
    optimizers: Changes = field(default_factory=dict)
    models: tuple[str, ...] = ()  # of "channels_last", "autocast", "compile"
    threads: int = 0  # 0: unchanged

    def __or__(self, other: "Patch") -> "Patch":
        loaders, optimizers = _merged(self.loaders, other.loaders), _merged(self.optimizers, other.optimizers)
        return Patch(loaders, optimizers, tuple(dict.fromkeys((*self.models, *other.models))), other.threads or self.threads)

    @property
    def num_workers(self) -> int:
        return max((change.get("num_workers", 0) for change in self.loaders.values()), default=0)


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change, its line in the script and its patch."""

    family: str
    name: str  # short, unique: "workers=2"
    change: str  # as code: "DataLoader(…, num_workers=2)"
    site: CallSite
    patch: Patch
    same_training: bool = True  # False: other batches, so the losses cannot be compared
    slow_start: bool = False
    note: str = ""


Proposed = Sequence[Proposal] | str


def workers(survey: Survey) -> Proposed:
    """Worker processes that make batches while the model computes."""
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
        if number == 0:  # DataLoader refuses these arguments without workers
            change |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None}
        elif any(loader.num_epochs > 1 and not loader.is_persistent for loader in loaders):
            change["persistent_workers"] = True
            words += ", persistent_workers=True"
        found.append(_loader_proposal("workers", f"workers={number}", words, loaders, change))
    return found


def pin_memory(survey: Survey) -> Proposed:
    """Batches in page-locked memory, which a device copies without the CPU."""
    if survey.is_on_cpu:
        return "nothing is on an accelerator"
    loaders = tuple(loader for loader in survey.feeding if not loader.pin_memory)
    if not loaders:
        return "every DataLoader that feeds the training has it already" if survey.feeding else "no DataLoader feeds the training"
    return [_loader_proposal("pin", "pin_memory", "pin_memory=True", loaders, {"pin_memory": True})]


def optimizer(survey: Survey) -> Proposed:
    """Updates of all parameters by a few calls instead of a loop."""
    if not survey.optimizers:
        return "no optimizer of torch.optim steps"
    found = []
    for implementation, slower in (("foreach", ("loop",)), ("fused", ("loop", "foreach"))):
        candidates = [each for each in survey.optimizers if implementation in each.supports and each.implementation in slower]
        if candidates:
            # foreach and fused exclude each other, so the other one is switched off even if the script asks for it.
            change = {implementation: True, ("foreach" if implementation == "fused" else "fused"): None}
            patch = Patch(optimizers={each.site.key: {k: v for k, v in change.items() if k in each.supports} for each in candidates})
            names = " and ".join(dict.fromkeys(each.name for each in candidates))
            found.append(Proposal("optimizer", implementation, f"{names}(…, {implementation}=True)", candidates[0].site, patch))
    if not found:
        return "the optimizer is fused already" if any(each.implementation == "fused" for each in survey.optimizers) else "it takes neither"
    return found


def threads(survey: Survey) -> Proposed:
    """The number of threads of an operation: more are not always faster."""
    if not survey.is_on_cpu:
        return "the work is done on an accelerator"
    numbers = sorted({1, *_up_to(survey.num_cores)} - {survey.num_threads})
    if not numbers:
        return "there is one core"
    site = survey.threads_set_at if survey.threads_set_at.key else CallSite("", "at the top", "")
    return [Proposal("threads", f"threads={num}", f"torch.set_num_threads({num})", site, Patch(threads=num)) for num in numbers]


def channels_last(survey: Survey) -> Proposed:
    """Images in the memory format that the convolutions of most libraries prefer."""
    models = [model for model in survey.models if model.takes_images and model.num_conv2d]
    if not models:
        return "no model takes images (4-D inputs) into Conv2d"
    if all(model.is_channels_last for model in models):
        return "the images are in channels_last already"
    words = f"{models[0].name}.to(memory_format=torch.channels_last)"
    note = "and its inputs: x.to(memory_format=torch.channels_last)"
    return [Proposal("channels_last", "channels_last", words, models[0].site, Patch(models=("channels_last",)), note=note)]


def autocast(survey: Survey) -> Proposed:
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
    return [Proposal("autocast", "bfloat16", words, model.site, Patch(models=("autocast",)), note=note)]


def compile_model(survey: Survey) -> Proposed:
    """The model compiled into a few generated kernels."""
    if not survey.models:
        return NO_MODEL
    if any(model.is_compiled for model in survey.models):
        return "the model is compiled already"
    if survey.is_on_cpu and not survey.has_compiler:
        return "torch.compile needs a C++ compiler, and none is installed"
    model = survey.models[0]
    words = f"{model.name} = torch.compile({model.name})"
    note = "after its construction; the keys of its state_dict then begin with _orig_mod."
    return [Proposal("compile", "compile", words, model.site, Patch(models=("compile",)), slow_start=True, note=note)]


def batch_size(survey: Survey) -> Proposed:
    """More samples per step. Compared by samples per second; the training is not the same."""
    loaders = tuple(loader for loader in survey.feeding if loader.batch_size is not None)
    if not loaders:
        return "no DataLoader with a batch_size feeds the training"
    note = "fewer updates per epoch: the learning rate may have to follow"
    found = []
    for factor in (2, 4):
        patch = Patch(loaders={loader.site.key: {"batch_size": factor * (loader.batch_size or 1)} for loader in loaders})
        words = f"batch_size={factor * (loaders[0].batch_size or 1)}"
        found.append(Proposal("batch", words, f"DataLoader(…, {words})", loaders[0].site, patch, same_training=False, note=note))
    return found


NO_MODEL = "no module with parameters was called in the training"

# Trials of seconds first, trials of minutes last.
FAMILIES: Mapping[str, Callable[[Survey], Proposed]] = {
    "workers": workers, "optimizer": optimizer, "threads": threads, "pin": pin_memory, "channels_last": channels_last, "autocast": autocast,
    "batch": batch_size, "compile": compile_model,
}  # fmt: skip


def chosen_families(only: Sequence[str]) -> tuple[str, ...]:
    """The families in `only`, in the order of FAMILIES; all if it is empty."""
    for name in only:
        if name not in FAMILIES:
            near = difflib.get_close_matches(name, FAMILIES, n=1)
            hint = f"Nearest: {near[0]}. " if near else ""
            raise SondeError(f"{name!r} is not a family of changes.\n{hint}All: {', '.join(FAMILIES)}")
    return tuple(name for name in FAMILIES if not only or name in only)


def propose(survey: Survey, families: Sequence[str]) -> tuple[list[Proposal], dict[str, str]]:
    """The proposals for a script, and the reason for each family that has none."""
    answers = {family: FAMILIES[family](survey) for family in families}
    found = [proposal for answer in answers.values() if not isinstance(answer, str) for proposal in answer]
    return found, {family: answer for family, answer in answers.items() if isinstance(answer, str)}


def _loader_proposal(family: str, name: str, words: str, loaders: Sequence[DataLoaderInfo], change: Mapping[str, Any]) -> Proposal:
    patch = Patch(loaders={loader.site.key: change for loader in loaders})
    return Proposal(family, name, f"DataLoader(…, {words})", loaders[0].site, patch)


def _up_to(num_cores: int) -> list[int]:
    """At most three numbers of threads or workers to try."""
    return sorted({max(num_cores // 4, 1), max(num_cores // 2, 1), num_cores})
