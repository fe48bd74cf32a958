"""What can be changed while a training runs: switches, their log output, triggers."""
