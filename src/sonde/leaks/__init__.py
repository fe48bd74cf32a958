"""Finds tensors that accumulate over the steps of a training, and the chain of references that keeps them alive."""
