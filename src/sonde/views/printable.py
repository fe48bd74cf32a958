"""Untrusted text made safe for a terminal.

A module may be named with an escape sequence in it, and so may a file or an argument. What a terminal could obey or
hide (control characters, escape, direction marks, lone surrogates, invisible spaces) is written out; everything that
has a shape is kept.
"""

from __future__ import annotations


def printable(text: object, *, lines: bool = False) -> str:
    """`text` with every character that has no shape written out, as `\\x1b` or `\\u202e`; `lines` keeps line breaks."""
    string = str(text)
    if string.isprintable():
        return string
    return "".join(char if char.isprintable() or (lines and char == "\n") else _escaped(char) for char in string)


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
