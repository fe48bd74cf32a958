"""Which operation made a NaN or an Inf: every operation of a step is traced."""
