"""Runs in the formats of other tools. Each exporter is a module here with one function, `export(run, output, replace) -> paths`.

This tuple lists them.
"""

from __future__ import annotations

EXPORTERS = ("parquet", "perfetto")
