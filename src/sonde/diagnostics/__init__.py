"""Diagnostics of a model and its training: architecture, training dynamics, health score. Without torch."""
