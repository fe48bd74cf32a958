"""What is measured: one aspect per file. The tuple lists them all; a test compares it with the folder."""

from __future__ import annotations

from sonde.capture.probes.activations import Activations
from sonde.capture.probes.base import Probe
from sonde.capture.probes.batch import Batch
from sonde.capture.probes.eval_in_train_mode import Validation
from sonde.capture.probes.memory import Memory
from sonde.capture.probes.parameters import Weights
from sonde.capture.probes.train_eval_mode import Modes

PROBES: tuple[type[Probe], ...] = (Activations, Batch, Memory, Modes, Validation, Weights)
