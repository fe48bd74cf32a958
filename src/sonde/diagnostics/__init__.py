"""Diagnostics of a model and its training: architecture, training dynamics, health score. Without torch."""

from __future__ import annotations

from sonde.diagnostics.metrics import ModelArchitectureInfo, ModelPerformanceMetrics

__all__ = ["ModelArchitectureInfo", "ModelPerformanceMetrics"]
