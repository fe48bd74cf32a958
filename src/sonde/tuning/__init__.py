"""`sonde tune`: measures changes that may make a training script faster, each in a process of its own.

`tune` plans and ranks without torch. A fork server imports torch once and forks one child per trial. The child runs the script under one
change until `StepTimer` has timed enough steps. No file of the user is modified.
"""
