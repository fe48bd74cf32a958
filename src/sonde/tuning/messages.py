"""What a trial finds out: what the script is made of, and how fast it ran. Plain values that cross from the child to the parent as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code. `key` tells it from every other one, `line` is for people."""

    key: str = ""
    line: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Loader:
    place: Place
    num_workers: int
    batch_size: int | None  # None: batches are made by a sampler, or not at all
    pin_memory: bool
    is_iterable: bool
    is_persistent: bool
    num_epochs: int  # begun while we looked
    fed_share: float  # of the steps


@dataclass(frozen=True, slots=True)
class Optimizer:
    place: Place
    name: str
    takes: tuple[str, ...]  # of "foreach" and "fused"
    way: str  # "fused", "foreach" or "loop"
    num_tensors: int
    device: str


@dataclass(frozen=True, slots=True)
class Model:
    place: Place  # where it is called
    name: str  # of the variable
    kind: str  # its class
    device: str
    is_float32: bool
    num_conv2d: int
    takes_images: bool  # a 4-D input
    is_channels_last: bool
    in_autocast: bool
    is_compiled: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """What the script is made of, as seen while its first steps ran unchanged."""

    loaders: tuple[Loader, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    models: tuple[Model, ...] = ()
    num_threads: int = 1
    threads_set_at: Place = Place()
    num_cores: int = 1
    has_compiler: bool = False
    world_size: int = 1

    @property
    def feeding(self) -> tuple[Loader, ...]:
        """The loaders that the training is fed by; one that only validation reads is not among them."""
        return tuple(loader for loader in self.loaders if loader.fed_share >= 0.5)

    @property
    def is_on_cpu(self) -> bool:
        return {*(each.device for each in self.optimizers), *(each.device for each in self.models)} <= {"cpu"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the script's first steps."""

    outcome: str  # "measured", "ended" (the script was over first), "failed", "stuck" (stopped from outside)
    error: str = ""
    num_steps: int = 0  # measured, after the warm-up
    seconds: float = 0.0  # that they took
    num_samples: int = 0  # that came from the loaders in that time
    waited_s: float = 0.0  # for them
    stock_share: float = 0.0  # of the batches: ready before the measured steps began, and used up in them
    warmup_s: float = 0.0  # from the first call of a training to the first measured step: compiling is in here
    total_steps: int = 0  # with the warm-up
    losses: tuple[float, ...] = ()  # of every step, from the first
    survey: Survey | None = None
    wall_s: float = 0.0  # of the whole process, as the parent saw it
    log: str = ""

    @property
    def is_usable(self) -> bool:
        return self.outcome in ("measured", "ended") and self.num_steps >= FEWEST_STEPS and self.seconds > 0 and self.stock_share < 1

    @property
    def steps_per_s(self) -> float:
        return self.num_steps * (1 - self.stock_share) / self.seconds

    @property
    def samples_per_s(self) -> float:
        return self.num_samples * (1 - self.stock_share) / self.seconds


@dataclass(frozen=True, slots=True)
class Request:
    """What the parent asks a child to try."""

    target: str
    args: list[str]
    module: bool
    patch: dict[str, Any]
    num_models: int
    warmup: int
    num_steps: int
    seconds: float
    result: str
    progress: str
    log: str


FEWEST_STEPS = 5  # measured ones: with fewer, one hiccup is the result


def read_trial(document: Mapping[str, Any]) -> Trial:
    """A trial from what the child wrote."""
    survey = document.get("survey")
    return Trial(**{**document, "losses": tuple(document["losses"]), "survey": None if survey is None else _survey(survey)})


def _survey(document: Mapping[str, Any]) -> Survey:
    return Survey(
        **{
            **document,
            "loaders": tuple(Loader(**_placed(each)) for each in document["loaders"]),
            "optimizers": tuple(Optimizer(**{**_placed(each), "takes": tuple(each["takes"])}) for each in document["optimizers"]),
            "models": tuple(Model(**_placed(each)) for each in document["models"]),
            "threads_set_at": Place(**document["threads_set_at"]),
        }
    )


def _placed(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**document, "place": Place(**document["place"])}
