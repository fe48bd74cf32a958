"""Writes files: completely or not at all, not over existing files, not through symbolic links."""

import hashlib
import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from sonde.errors import NO_ROOM, OutputExistsError, SondeError
from sonde.formatting import printable

UNSAFE = re.compile(r"[^\w. -]+")
DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # names that are no files on Windows
LONGEST = 60  # characters: even if each takes four bytes, the name is one that every file system takes


def file_name(name: str, suffix: str, *, reserved: Collection[str] = ()) -> str:
    """A file name for something that is named by the user: `layer/0 weird:name` gives `layer_0 weird_name-5bc0a1.png`.

    A safe name is unchanged. One that must be changed gets a digest, so that two names never share a file.
    """
    safe = UNSAFE.sub("_", name)[:LONGEST].strip("._ ") or "plot"
    safe = f"_{safe}" if DEVICES.match(safe) else safe
    # Not every file system distinguishes capitals: the digest does.
    is_unchanged = safe == name and name == name.lower() and f"{name}.{suffix}" not in reserved
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{safe}.{suffix}" if is_unchanged else f"{safe}-{digest}.{suffix}"


def make_folder(folder: Path) -> None:
    """Create a folder to write into, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SondeError(f"{printable(folder)} cannot be made: {error.strerror or error}.\nGive a folder that you may write to.") from None


def write_new(path: Path, content: str | bytes, *, replace: bool = False) -> None:
    """Write `content` to `path`. An existing file is refused unless `replace`, which puts a new file in its place."""
    if path.is_symlink():
        raise SondeError(f"{path} is a symbolic link. Sonde does not write through links: name the file itself.")
    if path.is_dir():
        raise SondeError(f"{path} is a directory. Name a file in it.")
    # A replacement is written beside its place and then moved there: a full disk leaves the old file as it was.
    target = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if replace else path
    try:
        file = open(target, "xb")  # noqa: SIM115 - exclusive: neither a file nor a link that appears meanwhile is followed
    except FileExistsError:
        raise OutputExistsError(path) from None
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
        if replace:
            os.replace(target, path)
    except BaseException as error:
        with suppress(OSError):
            target.unlink()
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise


def require_path(path: object) -> Path:
    """Returns the path; raises a `SondeError` for what is none, as None."""
    try:
        found = Path(path)  # type: ignore[arg-type]
        if str(path):
            return found
    except TypeError:
        pass
    raise SondeError(f'A file to write needs a path, not {path!r}. Pass a name such as "out/file.json".')


def replace_file(path: str | Path, content: str | bytes) -> Path:
    """Write `content` to `path`, in the place of an existing file; its folders are created. Returns the path."""
    target = require_path(path)
    make_folder(target.parent)
    write_new(target, content, replace=True)
    return target


def _unwritable(path: Path, error: OSError) -> SondeError:
    hint = "Make room there, or name another place." if error.errno in NO_ROOM else "Is its directory there, and yours?"
    return SondeError(f"{path} cannot be written: {error.strerror or error}.\n{hint}")
