"""Numbers of tensors: statistics, norms, finite checks, content hashes. A C extension reads CPU tensors, torch operations all others."""
