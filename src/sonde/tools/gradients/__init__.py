"""Parts of `GradientDebugger` and `GradientFlowAnimator`: frames, health classes, noise scale and report."""
