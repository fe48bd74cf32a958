"""`python -m sonde` is the command `sonde`."""

import contextlib
import os

from sonde.script_runner import remove_from_path

if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the working directory was deleted
        remove_from_path(os.getcwd())
    from sonde.cli import main

    main()
