"""Parts of `WeightAnalyzer`: initialization, spectrum, dead units and the activation after each layer."""
