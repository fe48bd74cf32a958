"""Statistics, comparison and number formats of single tensors; shared by all tools."""
