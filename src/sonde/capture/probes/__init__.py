"""What is measured, one aspect per file. The tuple lists all probes in the order in which they are called; a test compares it with the
folder. Results that a later probe needs are fields of the step's state."""

from sonde.capture.probes.activations import ActivationProbe
from sonde.capture.probes.batch_contents import BatchProbe
from sonde.capture.probes.dataloader_epochs import DataLoaderEpochProbe
from sonde.capture.probes.evaluation_in_train_mode import ForgottenEvalModeProbe
from sonde.capture.probes.finite_check import FiniteCheck
from sonde.capture.probes.learning_rate import LearningRateProbe
from sonde.capture.probes.loss import LossProbe
from sonde.capture.probes.lr_schedulers import SchedulerProbe
from sonde.capture.probes.memory_usage import MemoryProbe
from sonde.capture.probes.nonfinite_eval_outputs import EvalOutputProbe
from sonde.capture.probes.parameters_and_gradients import ParameterProbe
from sonde.capture.probes.probe import Probe
from sonde.capture.probes.source_lines_of_torch_calls import SourceLineProbe
from sonde.capture.probes.training_in_eval_mode import TrainEvalModeProbe

PROBES: tuple[type[Probe], ...] = (
    SourceLineProbe,
    LearningRateProbe,
    SchedulerProbe,
    DataLoaderEpochProbe,
    ParameterProbe,  # before the finite check, which then need not read the gradients again
    LossProbe,
    FiniteCheck,
    EvalOutputProbe,
    ActivationProbe,
    BatchProbe,
    TrainEvalModeProbe,
    ForgottenEvalModeProbe,
    MemoryProbe,
)
