"""What is diagnosed: one defect per file, in folders by what they are about. `registry.py` lists them all.

The docstring of a rule's module is its page (`sonde explain missing-zero-grad`).
"""
