"""What is measured: one aspect per file. The tuple lists them all; a test compares it with the folder."""

from __future__ import annotations

from sonde.capture.probes.activations import Activations
from sonde.capture.probes.batch import Batch
from sonde.capture.probes.memory import Memory
from sonde.capture.probes.modes import Modes
from sonde.capture.probes.probe import Probe
from sonde.capture.probes.validation import Validation
from sonde.capture.probes.weights import Weights

PROBES: tuple[type[Probe], ...] = (Activations, Batch, Memory, Modes, Validation, Weights)
