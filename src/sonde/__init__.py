"""Sonde: a debugger for PyTorch training. Importing it does nothing and costs nothing; every public name is loaded when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sonde.comparison.compare import RunComparison as RunComparison
    from sonde.comparison.compare import compare as compare
    from sonde.compat import LeakWatch as LeakWatch
    from sonde.config import DebugConfig as DebugConfig
    from sonde.config import DebugLevel as DebugLevel
    from sonde.config import DebugMode as DebugMode
    from sonde.diagnostics.data import ModelArchitectureInfo as ModelArchitectureInfo
    from sonde.diagnostics.data import ModelPerformanceMetrics as ModelPerformanceMetrics
    from sonde.diagnostics.report import DiagnosticsReport as DiagnosticsReport
    from sonde.errors import NonFiniteError as NonFiniteError
    from sonde.errors import SondeError as SondeError
    from sonde.events import Finding as Finding
    from sonde.events import Severity as Severity
    from sonde.leaks.leak_detector import LeakDetector as LeakDetector
    from sonde.memory_profiler.memory_profiler import MemoryProfiler as MemoryProfiler
    from sonde.nonfinite.find_origin import find_origin as find_origin
    from sonde.nonfinite.origin import Origin as Origin
    from sonde.profiler.operations import profile_operations as profile_operations
    from sonde.profiler.profiler import Profiler as Profiler
    from sonde.report import Report as Report
    from sonde.report import judge as judge
    from sonde.runlog.reader import Run as Run
    from sonde.session import DebugSession as DebugSession
    from sonde.session import debug_session as debug_session
    from sonde.session import watch as watch
    from sonde.step_decorator import step as step
    from sonde.tools.activation_visualizer import ActivationVisualizer as ActivationVisualizer
    from sonde.tools.debug_visualizer import DebugVisualizer as DebugVisualizer
    from sonde.tools.debug_visualizer import VisualizationConfig as VisualizationConfig
    from sonde.tools.gradient_debugger import GradientAnalyzer as GradientAnalyzer
    from sonde.tools.gradient_debugger import GradientDebugger as GradientDebugger
    from sonde.tools.gradient_flow_animator import GradientFlowAnimator as GradientFlowAnimator
    from sonde.tools.gradient_flow_animator import GradientHealth as GradientHealth
    from sonde.tools.hooks import AlertSeverity as AlertSeverity
    from sonde.tools.hooks import HookAction as HookAction
    from sonde.tools.hooks import HookBuilder as HookBuilder
    from sonde.tools.hooks import Hooks as Hooks
    from sonde.tools.hooks import HookTrigger as HookTrigger
    from sonde.tools.hooks import TrainingStopped as TrainingStopped
    from sonde.tools.loop_debugger.debug_info import DebugInfo as DebugInfo
    from sonde.tools.loop_debugger.loop_report import DebugReport as DebugReport
    from sonde.tools.model_diagnostics import ModelDiagnostics as ModelDiagnostics
    from sonde.tools.pytorch_debugger import PyTorchDebugger as PyTorchDebugger
    from sonde.tools.pytorch_debugger import PyTorchDebugManager as PyTorchDebugManager
    from sonde.tools.stability_checker import StabilityChecker as StabilityChecker
    from sonde.tools.tensor_inspector import TensorInspector as TensorInspector
    from sonde.tools.terminal_visualizer import TerminalVisualizer as TerminalVisualizer
    from sonde.tools.weight_analyzer import WeightAnalyzer as WeightAnalyzer

_HOMES = {
    "watch": "sonde.session",
    "DebugSession": "sonde.session",
    "debug_session": "sonde.session",
    "step": "sonde.step_decorator",
    "DebugConfig": "sonde.config",
    "DebugMode": "sonde.config",
    "DebugLevel": "sonde.config",
    "Run": "sonde.runlog.reader",
    "judge": "sonde.report",
    "Report": "sonde.report",
    "compare": "sonde.comparison.compare",
    "RunComparison": "sonde.comparison.compare",
    "Finding": "sonde.events",
    "Severity": "sonde.events",
    "SondeError": "sonde.errors",
    "NonFiniteError": "sonde.errors",
    "find_origin": "sonde.nonfinite.find_origin",
    "LeakDetector": "sonde.leaks.leak_detector",
    "LeakWatch": "sonde.compat",
    "Origin": "sonde.nonfinite.origin",
    # the workbench: tools by name, each useful alone
    "TensorInspector": "sonde.tools.tensor_inspector",
    "StabilityChecker": "sonde.tools.stability_checker",
    "GradientFlowAnimator": "sonde.tools.gradient_flow_animator",
    "GradientHealth": "sonde.tools.gradient_flow_animator",
    "GradientDebugger": "sonde.tools.gradient_debugger",
    "GradientAnalyzer": "sonde.tools.gradient_debugger",
    "WeightAnalyzer": "sonde.tools.weight_analyzer",
    "MemoryProfiler": "sonde.memory_profiler.memory_profiler",
    "ModelDiagnostics": "sonde.tools.model_diagnostics",
    "ModelArchitectureInfo": "sonde.diagnostics.data",
    "ModelPerformanceMetrics": "sonde.diagnostics.data",
    "DiagnosticsReport": "sonde.diagnostics.report",
    "ActivationVisualizer": "sonde.tools.activation_visualizer",
    "DebugVisualizer": "sonde.tools.debug_visualizer",
    "VisualizationConfig": "sonde.tools.debug_visualizer",
    "TerminalVisualizer": "sonde.tools.terminal_visualizer",
    "Profiler": "sonde.profiler.profiler",
    "PyTorchDebugger": "sonde.tools.pytorch_debugger",
    "PyTorchDebugManager": "sonde.tools.pytorch_debugger",
    "DebugInfo": "sonde.tools.loop_debugger.debug_info",
    "DebugReport": "sonde.tools.loop_debugger.loop_report",
    "HookBuilder": "sonde.tools.hooks",
    "HookTrigger": "sonde.tools.hooks",
    "HookAction": "sonde.tools.hooks",
    "AlertSeverity": "sonde.tools.hooks",
    "Hooks": "sonde.tools.hooks",
    "TrainingStopped": "sonde.tools.hooks",
    "profile_operations": "sonde.profiler.operations",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sonde' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
