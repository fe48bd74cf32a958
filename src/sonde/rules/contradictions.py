"""Checks what a finding states against its own evidence: the one place, for every rule.

`CLAIMS` lists what causes state, by the words that state it, and when the evidence beside it says the opposite. The engine withholds a
finding whose cause makes a claim that its evidence contradicts: the rule then counts as not evaluated, with the reason.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan

from sonde.events import Finding

DECAY = 1e-4  # update per weight: weight decay alone moves weights without a gradient by less
TINY = 1e-5  # update per weight that may be called "only"
LARGE = 0.5  # update per weight that may be blamed for a divergence
ZEROS = 0.9  # share of zeros that may be called dead
FELL = 0.1  # of the first loss: twice what a loss may have fallen that "did not fall"

Match = re.Match[str]


class Numbers:
    """The numbers of a finding's evidence. An absent one is NaN, and no comparison with NaN is true."""

    def __init__(self, evidence: Mapping[str, float | str]) -> None:
        self._evidence = evidence

    def __getitem__(self, name: str) -> float:
        value = self._evidence.get(name, nan)
        return nan if isinstance(value, str) else value

    def text(self, name: str) -> str:
        value = self._evidence.get(name, "")
        return value if isinstance(value, str) else ""

    @property
    def update(self) -> float:
        """The largest update per weight."""
        values = [self[name] for name in self._evidence if name.endswith("update_per_weight")]
        return max((value for value in values if value == value), default=nan)

    @property
    def fall(self) -> float:
        """By which share of its first level the loss fell."""
        first, recent = (max(self[f"{when}_loss"], self[f"{when}_level"], key=lambda value: value == value) for when in ("first", "recent"))
        return (first - recent) / abs(first) if first else nan


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement in causes.

    Args:
        rule: A rule that makes it.
        words: Pattern of the words.
        is_contradicted: Whether the evidence says the opposite.
        evidence: The numbers that are compared, for the message.
    """

    rule: str
    words: str
    is_contradicted: Callable[[Match, Numbers], bool]
    evidence: tuple[str, ...]


CLAIMS = (
    Claim(
        "loss-plateau",
        r"no gradient reaches (\d+) of (\d+) parameters",
        lambda words, numbers: words[1] == words[2] and numbers.update > DECAY,
        ("update_per_weight",),
    ),
    Claim("loss-plateau", r"an update changes the weights by only", lambda _, numbers: numbers.update > TINY, ("update_per_weight",)),
    Claim("loss-plateau", r"the loss is still", lambda _, numbers: numbers.fall > FELL, ("first_level", "recent_level")),
    Claim("vanishing-gradient", r"the loss did not fall", lambda _, numbers: numbers.fall > FELL, ("first_loss", "recent_loss")),
    Claim("dead-relu", r"the loss rose from", lambda _, numbers: numbers.fall > 0, ("first_loss", "recent_loss")),
    Claim(
        "lr-divergence",
        r"an update was \S+ times the size of (?:all|the measured) weights",
        lambda _, numbers: numbers.update < LARGE,
        ("largest_update_per_weight",),
    ),
    Claim("nonfinite-loss", r"losses are not finite", lambda _, numbers: numbers["num_nonfinite"] == 0, ("num_nonfinite",)),
    Claim("missing-backward", r"backward was never called", lambda _, numbers: numbers["backwards"] > 0, ("backwards",)),
    Claim("missing-optimizer-step", r"step\(\) was never called", lambda _, numbers: numbers["optimizer_steps"] > 0, ("optimizer_steps",)),
    Claim("missing-zero-grad", r"zero_grad\(\) was never called", lambda _, numbers: numbers["zero_grads"] > 0, ("zero_grads",)),
    Claim("missing-zero-grad", r"used gradients that still held", lambda _, numbers: numbers["stale_updates"] == 0, ("stale_updates",)),
    Claim("grads-cleared-before-step", r"were cleared", lambda _, numbers: numbers["cleared_updates"] == 0, ("cleared_updates",)),
    Claim("params-not-in-optimizer", r"no optimizer holds", lambda _, numbers: numbers["num_unowned"] == 0, ("num_unowned",)),
    Claim("stale-optimizer-params", r"are in no optimizer", lambda _, numbers: numbers["num_unowned"] == 0, ("num_unowned",)),
    Claim("unchanged-parameter", r"did not change at all", lambda _, numbers: numbers.text("restored") == "yes", ("restored",)),
    Claim("lr-stuck-in-warmup", r"was never stepped", lambda _, numbers: numbers["scheduler_steps"] > 0, ("scheduler_steps",)),
    Claim("lr-zero", r"is exactly 0 in", lambda _, numbers: numbers["num_zero"] == 0, ("num_zero",)),
    Claim("train-in-eval-mode", r"from forwards in eval mode", lambda _, numbers: numbers["updates_in_eval"] == 0, ("updates_in_eval",)),
    Claim(
        "eval-in-train-mode",
        r"without gradients in training mode",
        lambda _, numbers: numbers["pauses_in_training_mode"] == 0,
        ("pauses_in_training_mode",),
    ),
    Claim("constant-input", r"the same input for all samples", lambda _, numbers: numbers["batch_size"] < 2, ("batch_size",)),
    Claim("same-batch", r"were the same \d+ samples", lambda _, numbers: numbers["num_batches"] == 1, ("num_batches",)),
    Claim(
        "no-shuffle",
        r"the labels come sorted",
        lambda _, numbers: numbers["distinct"] >= numbers["distinct_by_chance"],
        ("distinct", "distinct_by_chance"),
    ),
    Claim("iterable-duplicated", r"each return the whole", lambda _, numbers: numbers["num_alike"] == 0, ("num_alike",)),
    Claim("worker-rng-duplicate", r"draw the same random numbers", lambda _, numbers: numbers["num_workers"] < 2, ("num_workers",)),
    Claim("input-bound", r"has no workers", lambda _, numbers: numbers["num_workers"] > 0, ("num_workers",)),
    Claim(
        "nan-input",
        r"^the input of step \d+ had",
        lambda _, numbers: numbers["num_nan"] + numbers["num_inf"] == 0,
        ("num_nan", "num_inf"),
    ),
    Claim("dead-relu", r"outputs \S+ % zeros", lambda _, numbers: numbers["zero_share"] < ZEROS, ("zero_share",)),
    Claim(
        "vanishing-gradient", r"^the gradient at .+ times that at", lambda _, numbers: numbers["first_over_last"] >= 1, ("first_over_last",)
    ),
    Claim("exploding-gradient", r"^the gradient norm jumped", lambda _, numbers: numbers["num_leaps"] == 0, ("num_leaps",)),
    Claim("loss-spike", r"jumped to \S+, where", lambda _, numbers: numbers["value"] <= numbers["usual"], ("value", "usual")),
    Claim(
        "loss-scale-collapse",
        r"the scale fell from",
        lambda _, numbers: numbers["lowest_scale"] > numbers["first_scale"],
        ("lowest_scale", "first_scale"),
    ),
    Claim("loss-scale-collapse", r"so no scale can help", lambda _, numbers: numbers.text("made_by") == "the scale", ("made_by",)),
)
"""What causes state. A rule that states something new adds a line."""


def contradiction(finding: Finding) -> str:
    """What in the evidence of a finding contradicts its cause, as a sentence; empty if nothing does."""
    numbers = Numbers(finding.evidence)
    for claim in CLAIMS:
        match = re.search(claim.words, finding.cause)
        if match is not None and claim.is_contradicted(match, numbers):
            values = [f"{name} {finding.evidence[name]}" for name in claim.evidence if name in finding.evidence]
            return f"it would say {match[0]!r}, which its evidence contradicts ({', '.join(values)})"
    return ""
