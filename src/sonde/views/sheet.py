"""One self-contained HTML page: nothing to load, light and dark. What stands in it is somebody else's."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

from sonde.views.printable import printable

# The page needs nothing from anywhere, so a browser is told to fetch nothing, whatever a name in it may contain.
# The cells of a heat map are a picture inside the page itself.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def sheet(title: str, body: str, *, script: str = "") -> str:
    """A page with a title, as text, and a body, as HTML. Its one script, where it has one, may run by its hash; nothing else may."""
    style = files("sonde.views").joinpath("style.css").read_text(encoding="utf-8")
    policy, run = POLICY, ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy, run = f"{POLICY}; script-src 'sha256-{digest}'", f"<script>{script}</script>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)} – Sonde</title>\n<style>\n{style}</style></head>\n<body>"
        f'<div class="brand">SONDE</div>{body}{run}</body></html>\n'
    )


def html_text(given: object) -> str:
    """Text of the user's, safe between tags and in quoted attributes."""
    return escape(printable(given))
