"""Who keeps a tensor alive: tensors that accumulate over the steps, and the chain of references that holds them."""
