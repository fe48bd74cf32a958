"""One fork server for all trials of these tests: importing torch takes longer than they do."""

from collections.abc import Iterator

import pytest

from sonde.tuning.start_trial_processes import TrialProcesses


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialProcesses]:
    with TrialProcesses(tmp_path_factory.mktemp("trials"), fork=True) as started:
        yield started
