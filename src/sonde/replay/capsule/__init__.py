"""Capsules: one step of a training in a directory, with weights, inputs and random state, to be replayed on another machine."""
