"""Running a step again: to find the operation, the samples or the parameters behind an incident."""
