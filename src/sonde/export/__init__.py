"""Runs in the formats of other tools. Each exporter is a module here with one function, `export(run, output, replace) -> paths`."""

EXPORTERS = ("parquet", "perfetto")
