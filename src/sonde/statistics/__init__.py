"""Numbers of tensors: statistics, norms, finite checks and fingerprints, native on the CPU and by torch operations elsewhere."""
