"""One self-contained HTML page, light and dark: it loads nothing, and text in it is escaped."""

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from sonde.formatting import printable, strict

# The browser must fetch nothing, whatever a name in the page may contain; the cells of a heat map are an image inside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html_page(title: str, body: str, *, script: str = "") -> str:
    """A page from a title (text) and a body (HTML). The script is allowed by its hash; no other script runs."""
    policy, run = POLICY, ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy, run = f"{POLICY}; script-src 'sha256-{digest}'", f"<script>{script}</script>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)} – Sonde</title>\n<style>\n{resource('style.css')}</style></head>\n<body>"
        f'<div class="brand">SONDE</div>{body}{run}</body></html>\n'
    )


def resource(name: str) -> str:
    """A style sheet or script of this folder."""
    return files("sonde.render.html").joinpath(name).read_text(encoding="utf-8")


def json_script(element_id: str, data: Any) -> str:
    """Data for the script of a page, in an element with this id. A "<" in the data cannot open a tag."""
    encoded = json.dumps(strict(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{element_id}">{encoded}</script>'


def definition_list(css_class: str, rows: Iterable[tuple[str, str]]) -> str:
    """Terms with their texts; empty where there are none."""
    inner = "".join(f"<div><dt>{html_text(term)}</dt><dd>{html_text(text)}</dd></div>" for term, text in rows)
    return f'<dl class="{css_class}">{inner}</dl>' if inner else ""


def bullet_list(texts: Iterable[str]) -> str:
    """A list of texts; empty where there are none."""
    items = "".join(f"<li>{html_text(text)}</li>" for text in texts)
    return f'<ul class="plain">{items}</ul>' if items else ""


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, css_class: str = "table") -> str:
    """A table of cells that are HTML: the contents of the head, and whole <td> elements."""
    names = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="{css_class}"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(text: object, *, css_class: str = "") -> str:
    """A cell of a table with untrusted text."""
    return f"<td{f' class={css_class}' if css_class else ''}>{html_text(text)}</td>"


def html_lines(text: str) -> str:
    """Text of several lines, for a <pre> element."""
    return "\n".join(html_text(row) for row in text.split("\n"))


def html_text(given: object) -> str:
    """Untrusted text, safe between tags and in quoted attributes."""
    return escape(printable(given))
