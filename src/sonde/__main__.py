"""`python -m sonde` is the command `sonde`."""

from sonde.cli import main

if __name__ == "__main__":
    main()
