"""Selects layers and parameters by name: globs, regular expressions, and the nearest names in errors."""

import difflib
import fnmatch
import logging
import re
import warnings
from collections.abc import Collection, Iterable, Sequence

from sonde.errors import SondeError
from sonde.formatting import listing

REGEX = "re:"
_GLOB_SIGNS = frozenset("*?[")
_REGEX_SIGNS = frozenset("^$\\(|+{")  # in no module's name and no glob
_END_OF_NUMBER = re.compile(r"(?<=[0-9\]])(?=\.)")
_log = logging.getLogger("sonde")


class LayerPatterns:
    """Patterns for dotted module names, compiled once: names (`encoder.0`), globs in which a star also matches dots (`attention.*` matches
    `attention`, `attention.query` and `layer.3.attention.query`), and regular expressions (`re:^layer\\.[0-3]\\.`). A pattern with one of
    `^ $ \\ ( | + {` is a regular expression also without `re:`, since no glob contains these. A glob that can be read as a regular
    expression matches as one too, from the start of a part to the end of the name: `attention.*` matches `attention_layer_1`."""

    def __init__(self, patterns: str | Sequence[str]) -> None:
        given: object = patterns
        if not isinstance(given, Iterable):
            raise SondeError(f'Patterns are given as a list of texts such as ["encoder.*", "head"], not as {given!r}.')
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        if not self.patterns:
            raise SondeError('The list of patterns is empty. Pass a name or a pattern, for instance "encoder.*".')
        self._compiled = [_compile(pattern) for pattern in self.patterns]
        self._warned: set[str] = set()

    def matches(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._compiled)

    def select(self, names: Iterable[str]) -> list[str]:
        """The matching names in their order. A pattern without a match is logged as a warning, once."""
        all_names = list(names)
        self.warn_unmatched(all_names)
        return [name for name in all_names if self.matches(name)]

    def warn_unmatched(self, names: Sequence[str]) -> list[str]:
        """Log the patterns that match none of the names. Returns a sentence for each that was not logged before."""
        sentences = []
        for pattern, compiled in zip(self.patterns, self._compiled):
            if pattern not in self._warned and not any(compiled.search(name) for name in names):
                self._warned.add(pattern)
                sentences.append(f"the pattern {pattern!r} matches nothing. {_nearest(pattern, names)}")
                _log.warning("sonde: %s", sentences[-1])
        return sentences

    def __repr__(self) -> str:
        return f"LayerPatterns({', '.join(map(repr, self.patterns))})"


def require_name(name: str, names: Collection[str], what: str = "layer") -> str:
    """Returns `name` if it is in `names`; otherwise raises a `SondeError` with the nearest names. `what` is the noun in the message."""
    if not isinstance(name, str):
        raise SondeError(f"The name of the {what} is a string, not {name!r} of type {type(name).__name__}.")
    if name not in names:
        raise SondeError(f"no {what} is named {name!r}.\n{_nearest(name, list(names))}")
    return name


def _compile(pattern: str) -> re.Pattern[str]:
    if not isinstance(pattern, str) or not pattern.removeprefix(REGEX):
        raise SondeError(f'A pattern is a string such as "encoder.*" or "re:^layer\\.[0-3]\\.", not {pattern!r}.')
    if pattern.startswith(REGEX) or _REGEX_SIGNS & set(pattern):
        text = pattern.removeprefix(REGEX)
        try:
            return re.compile(text)
        except re.error as error:
            advice = 'For names with wildcards a glob is enough, for instance "encoder.*.attention".'
            raise SondeError(f"The regular expression {text!r} is not valid: {error}.\n{advice}") from None
    if not _GLOB_SIGNS & set(pattern):
        return re.compile(rf"\A{re.escape(pattern)}\Z")
    module = pattern.removesuffix(".*") or pattern  # `attention.*`: the submodules of a module, and the module itself
    globs = [glob for stem in (pattern, module) for glob in (stem, f"*.{stem}")]
    return re.compile(rf"\A(?:{'|'.join([*map(fnmatch.translate, globs), *_as_regex(pattern)])})")


def _as_regex(glob: str) -> list[str]:
    """The glob read as a regular expression, if it is one. Both `layer.1.*` and `layer.[12].*` end a number at the dot: layer 10 is not
    meant."""
    text = _END_OF_NUMBER.sub(r"(?!\\d)", glob)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets in sets: Python may read them differently one day
            re.compile(text)
    except (re.error, FutureWarning):
        return []
    return [rf"(?:.*\.)?(?:{text})\Z"]


def _nearest(name: str, names: Sequence[str]) -> str:
    if not names:
        return "There are none."
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"Nearest: {', '.join(near)}" if near else f"There are: {listing(names)}"
