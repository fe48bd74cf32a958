"""How a step is measured: doors of modules and nodes of the graph write onto a tape, which is read when the step is over."""
