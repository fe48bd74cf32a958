"""Now and then one step in detail: times of lines and layers, synchronization points, transfers between devices."""
