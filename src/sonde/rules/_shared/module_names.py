"""Names the modules that hold a set of parameters."""

from collections.abc import Collection, Iterable


def modules_of(parameters: Iterable[str], everything: Collection[str]) -> list[str]:
    """The fewest modules that hold exactly these parameters, in their order: `encoder` instead of its forty weights.

    A module stands for its parameters only if all of its parameters in `everything` are meant. A parameter without such a module keeps its
    own path.
    """
    meant = list(dict.fromkeys(parameters))
    meant_set = set(meant)
    mixed: set[str] = {""}  # modules that also hold parameters that are not meant; the whole model is never "a module of it"
    for path in everything:
        if path not in meant_set:
            mixed.update(_owners(path))
    chosen: dict[str, None] = {}
    for path in meant:
        place = path
        for owner in _owners(path):
            if owner in mixed:
                break
            place = owner
        chosen[place] = None
    return list(chosen)


def _owners(path: str) -> list[str]:
    """From the nearest module to the farthest: `a.b.weight` gives `a.b`, `a`."""
    parts = path.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
