"""Small tables as aligned text, or as HTML for a notebook. Untrusted text in them is escaped here."""

from collections.abc import Sequence
from textwrap import wrap

from sonde.formatting import printable
from sonde.render.html.html_page import html_text

CELL = "padding:2px 12px 2px 0;text-align:{side};font-weight:{weight};white-space:nowrap"


def hanging(label: str, text: str, width: int = 80) -> list[str]:
    """`text` wrapped to `width` behind a label; the lines below are indented by the label's length."""
    lines = wrap(printable(text), width - len(label)) or [""]
    return [(label if not i else " " * len(label)) + line for i, line in enumerate(lines)]


def text_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """Columns two blanks apart; the first `left` of them and the last are aligned to the left."""
    from rich.cells import cell_len

    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(cell_len(line[column]) for line in lines) for column in range(len(head))]

    def aligned(column: int, cell: str) -> str:
        gap = " " * (widths[column] - cell_len(cell))
        return cell + gap if column < left or column == len(head) - 1 else gap + cell

    return "\n".join("  ".join(aligned(*each) for each in enumerate(line)).rstrip() for line in lines)


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", notes: Sequence[str] = ()) -> str:
    """For a notebook: styles are inline, colors are the notebook's own."""
    last = len(head) - 1

    def cells(row: Sequence[object], tag: str) -> str:
        weight = "600" if tag == "th" else "400"
        return "".join(
            f'<{tag} style="{CELL.format(side="left" if i in (0, last) else "right", weight=weight)}">{html_text(cell)}</{tag}>'
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    below = "".join(f"<div>{html_text(note)}</div>" for note in notes)
    return f"<div><b>{html_text(title)}</b><table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
