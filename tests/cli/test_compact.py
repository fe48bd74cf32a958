"""`sonde compact`: Parquet beside the log."""

import pytest


def test_compact_names_the_files_that_it_wrote(sonde, sick_run, tmp_path):
    pytest.importorskip("pyarrow")
    child = sonde("compact")
    assert child.returncode == 0, child.stderr
    paths = [tmp_path / line for line in child.stdout.splitlines()]
    assert paths
    assert all(path.suffix == ".parquet" and path.exists() for path in paths)
