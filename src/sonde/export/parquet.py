"""Exports a finished run as Parquet, for other programs and for reading by column. The `.sonde` files stay unchanged.

One file per kind of frame, with a row per step and site and a column per field; one file for the events and one for the sites. NaN,
infinities and -0.0 are preserved; a field that was not measured is null.
"""

import itertools
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sonde.errors import SondeError
from sonde.events import Frame
from sonde.runlog.run_reader import Run, RunProcess

MAX_KINDS, MAX_FIELDS = 200, 1000  # a real run has about ten of each, a malicious log any number
ROWS = 1 << 18  # per row group: bounds the memory, and compresses well


def export(run: Run, output: Path | None, *, replace: bool) -> list[Path]:
    """`sonde export --to parquet`, the same as `sonde compact`: the files lie beside the log."""
    if output is not None:
        raise SondeError(f"Parquet files are written beside the log, not to {output}. Leave -o out, and copy them from there.")
    return compact(run.path)


def compact(run_path: Path | str) -> list[Path]:
    """Write the Parquet files of a finished run into its directory, all of them or none. Returns their paths."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise SondeError("Compaction needs pyarrow. Install it with: pip install 'sonde[parquet]'") from None
    run = Run(run_path)
    if any(process.ended.how == "running" for process in run.processes):
        raise SondeError(f"{run.path} is still being written. Compact it when the training has ended.")
    directory = run.path if run.path.is_dir() else run.path.parent
    tables: dict[str, tuple[Any, Iterator[Any]]] = {
        "sites.parquet": (_site_schema(pa), _site_tables(pa, run)),
        "events.parquet": (_event_schema(pa), _event_tables(pa, run)),
    }
    if len(run.kinds) > MAX_KINDS:
        raise SondeError(f"{run.path} has {len(run.kinds):,} kinds of frames, and each would be a file: Sonde writes at most {MAX_KINDS}.")
    for kind in run.kinds:
        if len(fields := _fields(run, kind)) > MAX_FIELDS:
            raise SondeError(f"frames of the kind {kind[:40]!r} have {len(fields):,} fields: a table of Sonde has at most {MAX_FIELDS:,}.")
        schema = _frame_schema(pa, fields)
        tables[f"frames-{_file_name(kind)}.parquet"] = (schema, _frame_tables(pa, run, kind, fields, schema))
    done: dict[Path, Path] = {}
    try:
        for name, (schema, parts) in tables.items():
            temporary = directory / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
            done[temporary] = directory / name
            with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
                for part in parts:
                    writer.write_table(part, row_group_size=ROWS)
        for temporary, final in done.items():
            os.replace(temporary, final)
    except OSError as error:
        raise SondeError(f"{run.path} could not be compacted: {error.strerror or error}.") from error
    finally:
        for temporary in done:
            temporary.unlink(missing_ok=True)
    return sorted(done.values())


# ---- frames


def _frame_schema(pa: Any, fields: list[str]) -> Any:
    columns = [("rank", pa.int32()), ("attempt", pa.int32()), ("step", pa.int64()), ("site", pa.uint32())]
    columns += [("model", pa.string()), ("path", pa.string()), ("call", pa.int64()), ("item", pa.int64())]
    taken = dict(columns)  # a field may have the name of one of these
    return pa.schema(columns + [(f"{name}_" if name in taken else name, pa.float64()) for name in map(_strict, fields)])


def _fields(run: Run, kind: str) -> list[str]:
    layouts = (fields for process in run.processes for segment in process.segments for fields in segment.fields_of(kind))
    return list(dict.fromkeys(itertools.chain.from_iterable(layouts)))


def _frame_tables(pa: Any, run: Run, kind: str, fields: list[str], schema: Any) -> Iterator[Any]:
    for process in run.processes:
        batch: list[Frame] = []
        num_rows = 0
        for frame in process.frames(kind):
            batch.append(frame)
            num_rows += len(frame.sites)
            if num_rows >= ROWS:
                yield _frame_table(pa, process, batch, fields, schema)
                batch, num_rows = [], 0
        if batch:
            yield _frame_table(pa, process, batch, fields, schema)


def _frame_table(pa: Any, process: RunProcess, batch: list[Frame], fields: list[str], schema: Any) -> Any:
    """One row group, sorted by site and then by position in the file, so that readers can skip to a site by the group's statistics."""
    ids = np.concatenate([frame.sites for frame in batch])
    order = np.argsort(ids, kind="stable")
    steps = np.concatenate([np.full(len(frame.sites), frame.step, np.int64) for frame in batch])
    sites = [process.sites.get(number) for number in ids[order].tolist()]
    columns = [
        pa.array(np.full(len(ids), process.rank, np.int32)),
        pa.array(np.full(len(ids), process.attempt, np.int32)),
        pa.array(steps[order]),
        pa.array(ids[order]),
        *(pa.array([_strict(getattr(site, name)) if site else None for site in sites], pa.string()) for name in ("model", "path")),
        *(pa.array([getattr(site, name) if site else None for site in sites], pa.int64()) for name in ("call", "item")),
    ]
    for name in fields:
        known = np.concatenate([np.full(len(frame.sites), name in frame.fields) for frame in batch])
        values = np.concatenate([frame[name] if name in frame.fields else np.zeros(len(frame.sites)) for frame in batch], dtype=np.float64)
        columns.append(pa.array(values[order], mask=~known[order]))
    return pa.Table.from_arrays(columns, schema=schema)


# ---- events and sites


def _event_schema(pa: Any) -> Any:
    types = [("rank", pa.int32()), ("attempt", pa.int32()), ("step", pa.int64()), ("kind", pa.string())]
    return pa.schema([*types, ("data", pa.string())])  # data as JSON


def _event_tables(pa: Any, run: Run) -> Iterator[Any]:
    for process in run.processes:
        rows = []
        for event in process.events():
            data = json.dumps(event.data)  # ASCII: texts may contain lone surrogates
            rows.append((process.rank, process.attempt, event.step, _strict(event.kind), data))
            if len(rows) == ROWS:
                yield _table(pa, rows, _event_schema(pa))
                rows = []
        yield _table(pa, rows, _event_schema(pa))


def _site_schema(pa: Any) -> Any:
    texts = [(name, pa.string()) for name in ("kind", "path", "model", "type", "dtype")]
    numbers = [("rank", pa.int32()), ("attempt", pa.int32()), ("site", pa.uint32())]
    rest = [("call", pa.int64()), ("item", pa.int64()), ("shape", pa.list_(pa.int64())), ("trainable", pa.bool_())]
    return pa.schema(numbers + texts + rest)


def _site_tables(pa: Any, run: Run) -> Iterator[Any]:
    for process in run.processes:
        rows = [
            (
                *(process.rank, process.attempt, site.id),
                *map(_strict, (site.kind, site.path, site.model, site.type, site.dtype)),
                *(site.call, site.item, list(site.shape), site.trainable),
            )
            for site in process.sites.values()
        ]
        yield _table(pa, rows, _site_schema(pa))


def _table(pa: Any, rows: list[tuple[Any, ...]], schema: Any) -> Any:
    columns = list(zip(*rows)) if rows else [()] * len(schema)
    return pa.Table.from_arrays([pa.array(column, kind.type) for column, kind in zip(columns, schema)], schema=schema)


def _strict(text: str) -> str:
    """Arrow requires strict UTF-8: a lone surrogate is replaced by its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _file_name(kind: str) -> str:
    """A safe file name for a kind, which is untrusted text from a file."""
    safe = re.sub(r"[^a-z0-9_]", "", kind)[:60]
    return safe if safe and safe == kind else f"{safe}-{zlib.crc32(kind.encode('utf-8', 'surrogatepass')):08x}"
