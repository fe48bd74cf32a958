"""The request for a trial and its result, which cross between the processes as JSON: the parts of the script and its speed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIN_STEPS = 5  # measured steps: with fewer, one slow step decides the result


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of the user's code: `key` is unique, `line` is printed."""

    key: str = ""
    line: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class DataLoaderInfo:
    """One DataLoader of the script."""

    site: CallSite
    num_workers: int
    batch_size: int | None  # None: a batch sampler makes the batches, or there are none
    pin_memory: bool
    is_iterable: bool
    is_persistent: bool
    num_epochs: int = 0  # started during the trial
    fed_share: float = 0.0  # share of the steps that fetched from it


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """One optimizer of the script."""

    site: CallSite
    name: str
    supports: tuple[str, ...]  # of "foreach" and "fused"
    implementation: str  # "fused", "foreach" or "loop"
    device: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model of the script."""

    site: CallSite  # where the script calls it
    name: str  # of the variable that holds it
    device: str
    is_float32: bool
    num_conv2d: int
    takes_images: bool  # a 4-D input
    is_channels_last: bool
    in_autocast: bool
    is_compiled: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """Loaders, optimizers, models and threads of the script, found while its first steps run unchanged."""

    loaders: tuple[DataLoaderInfo, ...] = ()
    optimizers: tuple[OptimizerInfo, ...] = ()
    models: tuple[ModelInfo, ...] = ()
    num_threads: int = 1
    threads_set_at: CallSite = CallSite()
    num_cores: int = 1
    has_compiler: bool = False
    world_size: int = 1

    @property
    def feeding(self) -> tuple[DataLoaderInfo, ...]:
        """The loaders that feed the training, without those that only validation reads."""
        return tuple(loader for loader in self.loaders if loader.fed_share >= 0.5)

    @property
    def is_on_cpu(self) -> bool:
        return {*(each.device for each in self.optimizers), *(each.device for each in self.models)} <= {"cpu"}


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one run of the script's first steps."""

    outcome: str  # "measured", "ended" (the script ended first), "failed", "stuck" (killed after its time limit)
    error: str = ""
    num_steps: int = 0  # measured steps, after the warm-up
    seconds: float = 0.0  # duration of the measured steps
    num_samples: int = 0  # fetched from the loaders in that time
    waited_s: float = 0.0  # for the loaders
    prefetched_share: float = 0.0  # share of the batches that were ready before the measured steps
    warmup_s: float = 0.0  # from the first training call to the first measured step, including compilation
    total_steps: int = 0  # including the warm-up
    losses: tuple[float, ...] = ()  # of every step, including the warm-up
    survey: Survey | None = None
    wall_s: float = 0.0  # of the whole process, measured by the parent
    log: str = ""

    @property
    def is_usable(self) -> bool:
        return self.outcome in ("measured", "ended") and self.num_steps >= MIN_STEPS and self.seconds > 0 and self.prefetched_share < 1

    @property
    def steps_per_s(self) -> float:
        return self.num_steps * (1 - self.prefetched_share) / self.seconds

    @property
    def samples_per_s(self) -> float:
        return self.num_samples * (1 - self.prefetched_share) / self.seconds


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """Which script a child runs, under which patch and for how long."""

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


def read_trial(document: Mapping[str, Any]) -> Trial:
    """A trial from the JSON document of the child."""
    survey = _survey(document["survey"]) if document.get("survey") is not None else None
    return Trial(**{**document, "losses": tuple(document["losses"]), "survey": survey})


def _survey(document: Mapping[str, Any]) -> Survey:
    kinds = {"loaders": DataLoaderInfo, "optimizers": OptimizerInfo, "models": ModelInfo}
    parts: dict[str, Any] = {name: tuple(kind(**_with_site(each)) for each in document[name]) for name, kind in kinds.items()}
    return Survey(**{**document, **parts, "threads_set_at": CallSite(**document["threads_set_at"])})


def _with_site(document: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples and no dataclasses."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
    return {**plain, "site": CallSite(**document["site"])}
