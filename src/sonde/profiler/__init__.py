"""Profiles of training steps: time, memory and FLOPs by layer. The values exported here are saved, loaded and compared without torch."""

from sonde.profiler.profile_comparison import LayerChange, ProfileComparison
from sonde.profiler.profile_report import LayerCost, ProfileReport, Section, Span, TimeSpread, load, save
from sonde.profiler.recommendations import Bottleneck

__all__ = ["Bottleneck", "LayerChange", "LayerCost", "ProfileComparison", "ProfileReport", "Section", "Span", "TimeSpread", "load", "save"]
