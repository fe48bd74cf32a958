"""Times the module calls and autograd nodes of a step; used by the step profiler of a session and by the profiler."""
