"""A capsule: one step with its model, inputs and random state in a folder, to be run again on another machine."""
