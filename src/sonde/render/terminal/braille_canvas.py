"""A canvas of dots in text: two by four dots in each character, or one where the terminal knows no braille."""

# Which bit of U+2800 is which dot, by row and column of the character.
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
WIDE, HIGH = 2, 4
BLANK = 0x2800
# Without braille a character shows in which third of its height there are dots: high, middle, low.
ASCII = {(): " ", (0,): "'", (1,): "-", (2,): ".", (0, 1): "'", (1, 2): ":", (0, 2): ":", (0, 1, 2): "|"}
THIRDS = (0, 1, 1, 2)


class BrailleCanvas:
    """Dots from (0, 0), the top left, to (num_x - 1, num_y - 1). Dots outside are ignored."""

    def __init__(self, width: int, height: int, *, unicode: bool = True) -> None:
        self.width, self.height, self.unicode = max(width, 1), max(height, 1), unicode
        self.num_x, self.num_y = self.width * WIDE, self.height * HIGH
        self._bits = [[0] * self.width for _ in range(self.height)]
        self._marks: dict[tuple[int, int], str] = {}

    def dot(self, x: int, y: int) -> None:
        if 0 <= x < self.num_x and 0 <= y < self.num_y:
            self._bits[y // HIGH][x // WIDE] |= BITS[y % HIGH][x % WIDE]

    def line(self, x0: int, y0: int, x1: int, y1: int) -> None:
        """The dots nearest to the straight way from one point to another, both included."""
        num = max(abs(x1 - x0), abs(y1 - y0))
        for i in range(num + 1):
            share = i / num if num else 0.0
            self.dot(x0 + round((x1 - x0) * share), y0 + round((y1 - y0) * share))

    def mark(self, column: int, row: int, char: str) -> None:
        """A character in the place of dots; it may include escape sequences for its color."""
        if 0 <= column < self.width and 0 <= row < self.height:
            self._marks[row, column] = char

    def rows(self) -> list[str]:
        """The canvas as lines of text, each exactly `width` characters long."""
        rows = enumerate(self._bits)
        return ["".join(self._marks.get((row, column)) or self._draw(bits) for column, bits in enumerate(line)) for row, line in rows]

    def _draw(self, bits: int) -> str:
        if self.unicode:
            return chr(BLANK + bits) if bits else " "
        filled = {THIRDS[row] for row, pair in enumerate(BITS) if bits & (pair[0] | pair[1])}
        return ASCII[tuple(sorted(filled))]
