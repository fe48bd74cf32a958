"""Sonde: a debugger for PyTorch training. Importing it does nothing and costs nothing; every public name is loaded when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sonde.capture.session import DebugSession as DebugSession
    from sonde.capture.session import debug_session as debug_session
    from sonde.capture.session import watch as watch
    from sonde.capture.stepping import step as step
    from sonde.comparison.compare import RunComparison as RunComparison
    from sonde.comparison.compare import compare as compare
    from sonde.config import DebugConfig as DebugConfig
    from sonde.config import DebugLevel as DebugLevel
    from sonde.config import DebugMode as DebugMode
    from sonde.diagnostics.data import ModelArchitectureInfo as ModelArchitectureInfo
    from sonde.diagnostics.data import ModelPerformanceMetrics as ModelPerformanceMetrics
    from sonde.diagnostics.report import DiagnosticsReport as DiagnosticsReport
    from sonde.errors import NonFiniteError as NonFiniteError
    from sonde.errors import SondeError as SondeError
    from sonde.forensics.find import find_origin as find_origin
    from sonde.forensics.leaks import LeakWatch as LeakWatch
    from sonde.forensics.lookback import keep_capsule as keep_capsule
    from sonde.forensics.lookback import look_back as look_back
    from sonde.forensics.origin import Origin as Origin
    from sonde.forensics.overflow import look_at_overflow as look_at_overflow
    from sonde.forensics.spikes import look_at_spike as look_at_spike
    from sonde.record import Finding as Finding
    from sonde.record import Severity as Severity
    from sonde.report import Report as Report
    from sonde.report import judge as judge
    from sonde.run.reader import Run as Run
    from sonde.workbench.activation_visualizer import ActivationVisualizer as ActivationVisualizer
    from sonde.workbench.gradient_debugger import GradientAnalyzer as GradientAnalyzer
    from sonde.workbench.gradient_debugger import GradientDebugger as GradientDebugger
    from sonde.workbench.gradient_flow import GradientFlowAnimator as GradientFlowAnimator
    from sonde.workbench.gradient_flow import GradientHealth as GradientHealth
    from sonde.workbench.hooks import AlertSeverity as AlertSeverity
    from sonde.workbench.hooks import HookAction as HookAction
    from sonde.workbench.hooks import HookBuilder as HookBuilder
    from sonde.workbench.hooks import Hooks as Hooks
    from sonde.workbench.hooks import HookTrigger as HookTrigger
    from sonde.workbench.hooks import TrainingStopped as TrainingStopped
    from sonde.workbench.manual.info import DebugInfo as DebugInfo
    from sonde.workbench.manual.report import DebugReport as DebugReport
    from sonde.workbench.memory_profiler import MemoryProfiler as MemoryProfiler
    from sonde.workbench.model_diagnostics import ModelDiagnostics as ModelDiagnostics
    from sonde.workbench.operations import profile_operations as profile_operations
    from sonde.workbench.profiler import Profiler as Profiler
    from sonde.workbench.pytorch_debugger import PyTorchDebugger as PyTorchDebugger
    from sonde.workbench.pytorch_debugger import PyTorchDebugManager as PyTorchDebugManager
    from sonde.workbench.stability_checker import StabilityChecker as StabilityChecker
    from sonde.workbench.tensor_inspector import TensorInspector as TensorInspector
    from sonde.workbench.terminal_visualizer import TerminalVisualizer as TerminalVisualizer
    from sonde.workbench.visualizer import DebugVisualizer as DebugVisualizer
    from sonde.workbench.visualizer import VisualizationConfig as VisualizationConfig
    from sonde.workbench.weight_analyzer import WeightAnalyzer as WeightAnalyzer

_HOMES = {
    "watch": "sonde.capture.session",
    "DebugSession": "sonde.capture.session",
    "debug_session": "sonde.capture.session",
    "step": "sonde.capture.stepping",
    "DebugConfig": "sonde.config",
    "DebugMode": "sonde.config",
    "DebugLevel": "sonde.config",
    "Run": "sonde.run.reader",
    "judge": "sonde.report",
    "Report": "sonde.report",
    "compare": "sonde.comparison.compare",
    "RunComparison": "sonde.comparison.compare",
    "Finding": "sonde.record",
    "Severity": "sonde.record",
    "SondeError": "sonde.errors",
    "NonFiniteError": "sonde.errors",
    "look_back": "sonde.forensics.lookback",
    "keep_capsule": "sonde.forensics.lookback",
    "look_at_spike": "sonde.forensics.spikes",
    "look_at_overflow": "sonde.forensics.overflow",
    "find_origin": "sonde.forensics.find",
    "LeakWatch": "sonde.forensics.leaks",
    "Origin": "sonde.forensics.origin",
    # the workbench: tools by name, each useful alone
    "TensorInspector": "sonde.workbench.tensor_inspector",
    "StabilityChecker": "sonde.workbench.stability_checker",
    "GradientFlowAnimator": "sonde.workbench.gradient_flow",
    "GradientHealth": "sonde.workbench.gradient_flow",
    "GradientDebugger": "sonde.workbench.gradient_debugger",
    "GradientAnalyzer": "sonde.workbench.gradient_debugger",
    "WeightAnalyzer": "sonde.workbench.weight_analyzer",
    "MemoryProfiler": "sonde.workbench.memory_profiler",
    "ModelDiagnostics": "sonde.workbench.model_diagnostics",
    "ModelArchitectureInfo": "sonde.diagnostics.data",
    "ModelPerformanceMetrics": "sonde.diagnostics.data",
    "DiagnosticsReport": "sonde.diagnostics.report",
    "ActivationVisualizer": "sonde.workbench.activation_visualizer",
    "DebugVisualizer": "sonde.workbench.visualizer",
    "VisualizationConfig": "sonde.workbench.visualizer",
    "TerminalVisualizer": "sonde.workbench.terminal_visualizer",
    "Profiler": "sonde.workbench.profiler",
    "PyTorchDebugger": "sonde.workbench.pytorch_debugger",
    "PyTorchDebugManager": "sonde.workbench.pytorch_debugger",
    "DebugInfo": "sonde.workbench.manual.info",
    "DebugReport": "sonde.workbench.manual.report",
    "HookBuilder": "sonde.workbench.hooks",
    "HookTrigger": "sonde.workbench.hooks",
    "HookAction": "sonde.workbench.hooks",
    "AlertSeverity": "sonde.workbench.hooks",
    "Hooks": "sonde.workbench.hooks",
    "TrainingStopped": "sonde.workbench.hooks",
    "profile_operations": "sonde.workbench.operations",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sonde' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
