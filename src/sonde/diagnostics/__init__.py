"""What is known of a model and of its training, and what that means: values and judgements, without torch."""

from __future__ import annotations

from sonde.diagnostics.data import ModelArchitectureInfo, ModelPerformanceMetrics

__all__ = ["ModelArchitectureInfo", "ModelPerformanceMetrics"]
