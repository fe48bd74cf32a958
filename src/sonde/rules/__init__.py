"""What is diagnosed: one defect per file, its docstring is its page, and `RULES` is the list of them all.

A longer tuple extends it: `judge(run, rules=(*RULES, MyRule))`. The order is only the order of reading: from exact relations
to thresholds. K01, K02 … in the pages name the healthy programs in tests/faults/healthy that look sick and must pass.
"""

from __future__ import annotations

from sonde.rules.activation_heavy_layer import ActivationHeavyLayer
from sonde.rules.all_targets_ignored import AllTargetsIgnored
from sonde.rules.checkpoint_stall import CheckpointStall
from sonde.rules.constant_input import ConstantInput
from sonde.rules.cpu_oversubscribed import CpuOversubscribed
from sonde.rules.dead_relu import DeadRelu
from sonde.rules.eval_in_train_mode import EvalInTrainMode
from sonde.rules.exploding_gradient import ExplodingGradient
from sonde.rules.fatal_signal import FatalSignalRule
from sonde.rules.fp16_overflow import Fp16Overflow
from sonde.rules.gradient_spike import GradientSpike
from sonde.rules.grads_cleared_before_step import GradsClearedBeforeStep
from sonde.rules.graph_leak import GraphLeak
from sonde.rules.host_sync import HostSync
from sonde.rules.input_bound import InputBound
from sonde.rules.iterable_duplicated import IterableDuplicated
from sonde.rules.label_constant import LabelConstant
from sonde.rules.loss_plateau import LossPlateau
from sonde.rules.loss_scale_collapse import LossScaleCollapse
from sonde.rules.loss_spike import LossSpike
from sonde.rules.lr_divergence import LrDivergence
from sonde.rules.lr_stuck_in_warmup import LrStuckInWarmup
from sonde.rules.lr_zero import LrZero
from sonde.rules.memory_growth import MemoryGrowth
from sonde.rules.missing_backward import MissingBackward
from sonde.rules.missing_optimizer_step import MissingOptimizerStep
from sonde.rules.missing_zero_grad import MissingZeroGrad
from sonde.rules.nan_grad_sqrt_zero import NanGradSqrtZero
from sonde.rules.nan_grad_where import NanGradWhere
from sonde.rules.nan_input import NanInput
from sonde.rules.no_shuffle import NoShuffle
from sonde.rules.nonfinite_evaluation import NonfiniteEvaluation
from sonde.rules.nonfinite_loss import NonfiniteLoss
from sonde.rules.nonfinite_origin import NonfiniteOrigin
from sonde.rules.out_of_memory import OutOfMemory
from sonde.rules.params_not_in_optimizer import ParamsNotInOptimizer
from sonde.rules.python_bound import PythonBound
from sonde.rules.rule import Answer, Clear, NotEvaluated, Rule
from sonde.rules.same_batch import SameBatch
from sonde.rules.scheduler_before_optimizer import SchedulerBeforeOptimizer
from sonde.rules.scheduler_never_stepped import SchedulerNeverStepped
from sonde.rules.scheduler_too_often import SchedulerTooOften
from sonde.rules.scheduler_too_rarely import SchedulerTooRarely
from sonde.rules.silent_transfer import SilentTransfer
from sonde.rules.slow_layer import SlowLayer
from sonde.rules.slow_step_outliers import SlowStepOutliers
from sonde.rules.stale_optimizer_params import StaleOptimizerParams
from sonde.rules.tensor_left_behind import TensorLeftBehind
from sonde.rules.train_in_eval_mode import TrainInEvalMode
from sonde.rules.unchanged_parameter import UnchangedParameter
from sonde.rules.unfused_optimizer import UnfusedOptimizer
from sonde.rules.unstable_softmax import UnstableSoftmax
from sonde.rules.validation_dominates import ValidationDominates
from sonde.rules.vanishing_gradient import VanishingGradient
from sonde.rules.worker_rng_duplicate import WorkerRngDuplicate

RULES: tuple[type[Rule], ...] = (
    MissingBackward,
    MissingOptimizerStep,
    MissingZeroGrad,
    GradsClearedBeforeStep,
    StaleOptimizerParams,
    ParamsNotInOptimizer,
    LrZero,
    SchedulerTooOften,
    SchedulerTooRarely,
    LrStuckInWarmup,
    SchedulerNeverStepped,
    SchedulerBeforeOptimizer,
    TrainInEvalMode,
    EvalInTrainMode,
    SameBatch,
    ConstantInput,
    LabelConstant,
    IterableDuplicated,
    WorkerRngDuplicate,
    NoShuffle,
    TensorLeftBehind,
    SilentTransfer,
    UnchangedParameter,
    GraphLeak,
    MemoryGrowth,
    ActivationHeavyLayer,
    OutOfMemory,
    FatalSignalRule,
    NanInput,
    UnstableSoftmax,
    NanGradSqrtZero,
    NanGradWhere,
    AllTargetsIgnored,
    Fp16Overflow,
    NonfiniteOrigin,
    LossScaleCollapse,
    ExplodingGradient,
    LrDivergence,
    LossSpike,
    GradientSpike,
    DeadRelu,
    VanishingGradient,
    NonfiniteLoss,
    NonfiniteEvaluation,
    LossPlateau,
    CpuOversubscribed,
    InputBound,
    ValidationDominates,
    CheckpointStall,
    HostSync,
    UnfusedOptimizer,
    PythonBound,
    SlowLayer,
    SlowStepOutliers,
)

__all__ = ["RULES", "Answer", "Clear", "NotEvaluated", "Rule"]
