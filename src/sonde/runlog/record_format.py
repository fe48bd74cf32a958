"""Encodes and decodes the records of a run, as described in docs/run-format.md. No other module knows the bytes.

Frames are written by a plan with a cached constant part. Decoding checks every length before it is used.
"""

import hashlib
import json
import numbers
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from sonde.events import Event, Frame, Site

FORMAT = 1
MAGIC = b"SONDE\0"
MARKER = b"\xf5SN\n"  # F5 never occurs in UTF-8, so text cannot contain it; numbers contain it once in four billion bytes
HEADER_BYTES = 16
RECORD_BYTES = 16  # in front of each payload
MAX_PAYLOAD = 64 << 20  # the longest record: a damaged length never makes a reader allocate more
MAX_NAME = 1000  # characters; torch allows module names of any length
MAX_TEXT = 20_000  # characters, for error texts and the like, which nothing compares
MAX_DEPTH = 8  # of nested event data

MANIFEST, SITES, FRAME, EVENT, GAP = 1, 2, 3, 4, 5

_HEADER = struct.Struct("<6sHII")
_CHECKED = struct.Struct("<B3sI")
_U32 = struct.Struct("<I")
_FRAME = struct.Struct("<qqBBHHHI")
_CLOCK = struct.Struct("<qq")
_CONSTANT = struct.Struct("<BBHHHI")
_TEXTS = frozenset({"text", "exception", "error", "reason", "traceback"})
_F4, _F8, _SINGLE, _DOUBLE = np.dtype("<f4"), np.dtype("<f8"), np.dtype(np.float32), np.dtype(np.float64)
_HUGE = 1 << 10_000  # Python refuses to print integers of more than 4300 digits


class FormatError(ValueError):
    """The bytes are not a valid record. Readers report it as damage; it is never raised to the user."""


# ---- the parts of a file


def header(version: int = FORMAT) -> bytes:
    start = _HEADER.pack(MAGIC, version, 0, 0)[:12]
    return start + _U32.pack(zlib.crc32(start))


def version_of(start: bytes) -> int | None:
    """The format version in a file's first 16 bytes; None if they are not a complete header."""
    if len(start) < HEADER_BYTES:
        return None
    magic, version, _, check = _HEADER.unpack_from(start)
    return int(version) if magic == MAGIC and check == zlib.crc32(start[:12]) else None


def record(type_: int, payload: bytes) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise FormatError(f"a record of {len(payload)} bytes; the longest has {MAX_PAYLOAD}")
    checked = _CHECKED.pack(type_, b"\0\0\0", len(payload))
    return b"".join((MARKER, checked, _U32.pack(zlib.crc32(payload, zlib.crc32(checked))), payload))


def manifest_record(manifest: Mapping[str, Any]) -> bytes:
    return record(MANIFEST, _json(plain(manifest)))


def sites_records(sites: Sequence[Site]) -> list[bytes]:
    """Sites, a thousand per record: with the longest allowed names that is far below the longest record."""
    return [record(SITES, _json([_site_json(site) for site in sites[first : first + 1000]])) for first in range(0, len(sites), 1000)]


def _site_json(site: Site) -> dict[str, Any]:
    values = {name: getattr(site, name) for name in Site.__slots__}
    texts = {name: capped(value) for name, value in values.items() if isinstance(value, str)}
    return values | texts | {"shape": [int(length) for length in site.shape]}


def event_record(kind: str, step: int, time_ns: int, data: Mapping[str, Any]) -> bytes:
    return record(EVENT, _json({"kind": kind, "step": step, "time_ns": time_ns, "data": plain(data)}))


class Gap(NamedTuple):
    """Records that could not be written."""

    num_dropped: int
    first_step: int  # -1: not known
    last_step: int
    reason: str


def gap_record(gap: Gap) -> bytes:
    return record(GAP, _json(gap._asdict()))


class FramePlan:
    """Encodes the frames of one kind, fields and sites; the constant part is encoded once."""

    __slots__ = ("_double", "_pack", "_shape", "_single", "kind")

    def __init__(self, kind: str, fields: Sequence[str], site_ids: Sequence[int] | np.ndarray[Any, Any], *, exact: bool) -> None:
        ids = np.asarray(site_ids, dtype=np.uint32 if len(site_ids) else None).astype("<u4")
        if any("," in name or not name for name in fields):
            raise FormatError(f"field names are joined by commas and cannot hold one: {fields}")
        self.kind = kind
        self._shape = (len(ids), len(fields))
        self._pack = struct.Struct(f"<{len(ids)}d").pack  # of a plan with a single field
        self._single = None if exact else _constant_parts(kind, fields, ids, 4)
        self._double = _constant_parts(kind, fields, ids, 8)

    def encode(self, step: int, time_ns: int, rows: np.ndarray[Any, np.dtype[np.float64]]) -> bytes:
        """One record. Numbers take 4 bytes unless that would make a finite one infinite or a non-zero one zero."""
        if rows.shape != self._shape:
            raise FormatError(f"a {self.kind} frame of shape {rows.shape} where {self._shape} was planned")
        values = _as_singles(rows) if self._single is not None else None
        front, seed, constant = self._double if values is None or self._single is None else self._single
        if values is None:
            values = rows.T.astype(_F8, order="C").tobytes()
        payload = b"".join((_CLOCK.pack(step, time_ns), constant, values))
        return b"".join((front, _U32.pack(zlib.crc32(payload, seed)), payload))

    def encode_column(self, step: int, time_ns: int, values: Sequence[float]) -> bytes:
        """One record of a plan with a single field, from plain floats: the frame that every step writes."""
        if (len(values), 1) != self._shape:
            raise FormatError(f"a {self.kind} frame of {len(values)} values where {self._shape} was planned")
        front, seed, constant = self._double
        payload = b"".join((_CLOCK.pack(step, time_ns), constant, self._pack(*values)))
        return b"".join((front, _U32.pack(zlib.crc32(payload, seed)), payload))


def _constant_parts(kind: str, fields: Sequence[str], ids: Any, value_bytes: int) -> tuple[bytes, int, bytes]:
    """Marker to length, the checksum up to there, and the payload between clock and values."""
    kind_text, fields_text = _text(kind), _text(",".join(fields))
    constant = b"".join(
        (_CONSTANT.pack(value_bytes, 0, len(kind_text), len(fields_text), 0, len(ids)), kind_text, fields_text, ids.tobytes())
    )
    length = _CLOCK.size + len(constant) + value_bytes * len(ids) * len(fields)
    if length > MAX_PAYLOAD:
        raise FormatError(f"a frame of {length} bytes; the longest record has {MAX_PAYLOAD}")
    checked = _CHECKED.pack(FRAME, b"\0\0\0", length)
    return MARKER + checked, zlib.crc32(checked), constant


def _as_singles(rows: Any) -> bytes | None:
    """The columns in single precision; None if a number would become infinite or zero."""
    with np.errstate(all="ignore"):  # the user may have set numpy to raise, even for harmless underflow
        values = rows.T.astype(_F4, order="C")
        is_preserved = np.count_nonzero(values) == np.count_nonzero(rows) and np.array_equal(np.isinf(values), np.isinf(rows.T))
        return values.tobytes() if is_preserved else None


# ---- text


def capped(text: str, limit: int = MAX_NAME) -> str:
    """The text, cut to `limit` characters with a hash of the whole text, so that different texts stay different."""
    if len(text) <= limit:
        return text
    digest = hashlib.blake2b(_text(text), digest_size=6).hexdigest()
    return f"{text[: limit - 14]}…#{digest}"


def plain(value: Any, depth: int = 0, *, limit: int = MAX_NAME) -> Any:
    """The value converted to the types of JSON, bounded in depth and in the length of texts."""
    if value is None or isinstance(value, (bool, float)) or (type(value) is int and -_HUGE < value < _HUGE):
        return value  # the most frequent types first: the checks of abstract classes below are slow
    if isinstance(value, str):
        return capped(str(value), limit)
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, (dict, Mapping)):
        return {capped(str(key)): plain(item, depth + 1, limit=MAX_TEXT if key in _TEXTS else limit) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1, limit=limit) for item in value]
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if -_HUGE < number < _HUGE else capped(hex(number))
    if isinstance(value, numbers.Real):
        return float(value)
    return capped(str(value), limit)


def _text(text: str) -> bytes:
    # torch allows lone surrogates in module names; strict UTF-8 does not encode them
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    return _text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def parse_json(payload: bytes) -> Any:
    try:
        return json.loads(payload.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from None


# ---- decoding


@dataclass(frozen=True, slots=True)
class Layout:
    """The constant part of the frames of one plan; it locates a single number without reading the rest."""

    kind: str
    fields: tuple[str, ...]
    sites: np.ndarray[Any, np.dtype[np.uint32]]
    value_bytes: int
    start: int  # of the values, in the payload
    num_bytes: int  # of the whole payload


def step_and_constant_part(payload: bytes) -> tuple[int, bytes]:
    """The step of a frame, and the bytes that all frames of its plan share."""
    step, _, _, _, kind_bytes, fields_bytes, _, num_sites = frame_head(payload)
    return step, payload[_CLOCK.size : _FRAME.size + kind_bytes + fields_bytes + 4 * num_sites]


def frame_head(payload: bytes) -> tuple[int, ...]:
    """The fixed fields of a frame; the first is its step."""
    if len(payload) < _FRAME.size:
        raise FormatError("a frame that ends in its head")
    return _FRAME.unpack_from(payload)


def layout(payload: bytes) -> Layout:
    _, _, value_bytes, _, kind_bytes, fields_bytes, _, num_sites = frame_head(payload)
    fields_at = _FRAME.size + kind_bytes
    sites_at = fields_at + fields_bytes
    start = sites_at + 4 * num_sites
    if value_bytes not in (4, 8) or len(payload) < start:
        raise FormatError("a frame whose head does not fit its length")
    try:
        kind = payload[_FRAME.size : fields_at].decode("utf-8", "surrogatepass")
        fields_text = payload[fields_at:sites_at].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise FormatError("a frame whose names are not text") from None
    fields = tuple(fields_text.split(",")) if fields_text else ()
    if len(payload) != start + value_bytes * len(fields) * num_sites:
        raise FormatError("a frame whose values do not fit its length")
    sites = np.frombuffer(payload, "<u4", num_sites, sites_at).astype(np.uint32)
    sites.flags.writeable = False  # shared by all frames of this layout
    return Layout(kind, fields, sites, value_bytes, start, len(payload))


def frame(payload: bytes, shape: Layout | None = None) -> Frame:
    """Decode a frame. `shape` is its layout, if known."""
    shape = shape or layout(payload)
    if len(payload) != shape.num_bytes:
        raise FormatError("a frame that does not have its plan's length")
    step, *_ = frame_head(payload)
    stored, native = (_F4, _SINGLE) if shape.value_bytes == 4 else (_F8, _DOUBLE)
    raw: Any = np.frombuffer(payload, stored, len(shape.fields) * len(shape.sites), shape.start)
    values = raw.reshape(len(shape.fields), len(shape.sites)).astype(native)
    return Frame(shape.kind, step, shape.sites, shape.fields, values)


def event(payload: bytes) -> tuple[Event, int]:
    """An event and its time_ns."""
    content = parse_json(payload)
    if not isinstance(content, dict):
        raise FormatError("an event that is not an object")
    kind, step, time_ns, data = content.get("kind"), content.get("step"), content.get("time_ns"), content.get("data")
    if not isinstance(kind, str) or not _is_int64(step) or not isinstance(data, dict):
        raise FormatError("an event without kind, step and data")
    return Event(kind, step, data), time_ns if _is_int64(time_ns) else 0


def sites(payload: bytes) -> list[Site]:
    content = parse_json(payload)
    if not isinstance(content, list):
        raise FormatError("sites that are not a list")
    return [_site(item) for item in content]


def _site(item: Any) -> Site:
    if not isinstance(item, dict):
        raise FormatError("a site that is not an object")
    number, kind, path = item.get("id"), item.get("kind"), item.get("path")
    shape = item.get("shape", [])
    if not _is_int64(number) or not 0 <= number < 1 << 32 or not isinstance(kind, str) or not isinstance(path, str):
        raise FormatError("a site without id, kind and path")
    if not isinstance(shape, list) or not all(map(_is_int64, shape)):
        raise FormatError("a site whose shape is not whole numbers")
    texts = {key: item[key] for key in ("model", "type", "dtype") if isinstance(item.get(key), str)}
    counts = {key: item[key] for key in ("call", "item") if _is_int64(item.get(key))}
    return Site(number, kind, path, shape=tuple(shape), trainable=item.get("trainable") is not False, **texts, **counts)


def gap(payload: bytes) -> Gap:
    content = parse_json(payload)
    if not isinstance(content, dict):
        raise FormatError("a gap that is not an object")
    num_dropped, first_step, last_step = (content.get(key) for key in Gap._fields[:3])
    if not (_is_int64(num_dropped) and _is_int64(first_step) and _is_int64(last_step)):
        raise FormatError("a gap without its numbers")
    return Gap(num_dropped, first_step, last_step, str(content.get("reason", "")))


def _is_int64(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
