"""Finds the operation that creates a NaN or an Inf by tracing every operation of a step."""
