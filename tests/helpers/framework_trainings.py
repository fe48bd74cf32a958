"""One small language model, trained by hand, by Lightning, by the Trainer of transformers and by a loop of accelerate: sound, and with the
same three faults planted. The Trainer trains a GPT-2 made from a configuration; the others a model of our own.

Each returns where the run is. Warnings that these packages give of themselves are silenced here, by their words: none of them is ours.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import sonde

FAULTS = {"lr-zero": "lr-zero", "head-forgotten": "params-not-in-optimizer", "all-ignored": "all-targets-ignored"}  # and the rule for each
NUM_BATCHES, BATCH, WORDS, LENGTH = 21, 4, 16, 8


@contextmanager
def silenced() -> Iterator[None]:
    """Messages of these packages about themselves."""
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "pytorch_lightning", "transformers")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*no `val_dataloader`.*")
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


class Babbler(nn.Module):
    """What comes next, from one word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x)))


def sentences(fault: str = "") -> list[dict[str, Tensor]]:
    """Each word follows from the one before. Where all targets of a batch are ignored, its loss is 0 / 0."""
    found = []
    for i in range(NUM_BATCHES * BATCH):
        x = (torch.arange(LENGTH) * 3 + i) % WORDS
        ignored = fault == "all-ignored" and NUM_BATCHES // 2 <= i // BATCH < NUM_BATCHES // 2 + 1
        found.append({"input_ids": x, "labels": torch.full_like(x, -100) if ignored else x})
    return found


def loader(fault: str = "") -> DataLoader[Any]:
    return DataLoader(sentences(fault), batch_size=BATCH)  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["input_ids"])[:, :-1]
    return F.cross_entropy(out.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def optimizer_of(model: nn.Module, fault: str = "") -> torch.optim.Optimizer:
    forgotten = {id(p) for name, p in model.named_parameters() if name.startswith(("head", "transformer.h.1"))}
    held = [p for p in model.parameters() if fault != "head-forgotten" or id(p) not in forgotten]
    return torch.optim.AdamW(held, lr=0.0 if fault == "lr-zero" else 1e-2)


def by_hand(fault: str, to: Path) -> Path:
    torch.manual_seed(0)
    model = Babbler()
    optimizer = optimizer_of(model, fault)
    with sonde.watch(model, optimizer, to=to, every=1, strict=True):
        for batch in loader(fault):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return to


def lightning_module(pl: Any, fault: str = "") -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]
        """Calls parts of itself, never itself."""

        def __init__(self) -> None:
            super().__init__()
            inner = Babbler()
            self.words, self.body, self.head = inner.words, inner.body, inner.head

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            return loss_of(lambda x: self.head(self.body(self.words(x))), batch)  # type: ignore[arg-type]

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self, fault)

    torch.manual_seed(0)
    return Module()


def lightning_trainer(pl: Any, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"max_epochs": 1, "accelerator": "cpu", "log_every_n_steps": 1, **quiet, **settings})


def by_lightning(fault: str, to: Path) -> Path:
    import lightning.pytorch as pl

    from sonde.integrations.lightning import SondeCallback

    with silenced():
        lightning_trainer(pl, callbacks=SondeCallback(to=to, every=1, strict=True)).fit(lightning_module(pl, fault), loader(fault))
    return to


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    return GPT2LMHeadModel(config)


def trainer(to: Path, model: Any, *callbacks: Any, fault: str = "", **settings: Any) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    arguments = TrainingArguments(
        **{
            "output_dir": str(to / "checkpoints"), "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "logging_steps": 4,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "log_level": "error",
            "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "dataloader_pin_memory": False, **settings,
        }
    )  # fmt: skip
    found = Trainer(
        model=model, args=arguments, train_dataset=sentences(fault), eval_dataset=sentences()[:8], callbacks=list(callbacks),
        optimizers=(optimizer_of(model, fault), None),
    )  # fmt: skip
    found.remove_callback(PrinterCallback)
    return found


def by_trainer(fault: str, to: Path) -> Path:
    from sonde.integrations.transformers import SondeCallback

    with silenced():
        trainer(to.parent, gpt2(), SondeCallback(to=to, every=1, strict=True), fault=fault).train()
    return to


def by_accelerate(fault: str, to: Path) -> Path:
    from accelerate import Accelerator

    from sonde.integrations.accelerate import SondeTracker

    with silenced():
        accelerator = Accelerator(cpu=True, log_with=SondeTracker(to=to, every=1, strict=True))
        torch.manual_seed(0)
        model = Babbler()
        accelerator.init_trackers("babble", config={"fault": fault})
        model, optimizer, batches = accelerator.prepare(model, optimizer_of(model, fault), loader(fault))
        for batch in batches:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"train_loss": loss.item()})
        accelerator.end_training()
    return to


def logged(run: sonde.Run, name: str) -> list[float]:
    """What was logged under a name."""
    return run.scalar(name)[1].tolist()


WAYS: dict[str, tuple[str, Callable[[str, Path], Path]]] = {  # the package that each needs
    "by hand": ("torch", by_hand),
    "lightning": ("lightning", by_lightning),
    "transformers": ("transformers", by_trainer),
    "accelerate": ("accelerate", by_accelerate),
}
