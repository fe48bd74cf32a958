"""Changes that make a training faster, each measured on the user's own script in a process of its own.

`tune` plans and ranks without torch. A nursery imports torch once and forks a child per trial; there the script runs under one change until
a stopwatch has seen enough of its steps. No file of the user's is touched.
"""
