"""How one object holds another, in the words of the program: an index, a key, an attribute, a closure."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from types import BuiltinMethodType, CellType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

from sonde.leaks.live_frames import called, local_ids

_CHILDREN = {"_modules", "_parameters", "_buffers"}  # of torch.nn.Module: an attribute of the module itself to its user
_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_MAX_KEY = 40  # characters of a key that are shown


def is_a(thing: Any, kind: type | tuple[type, ...]) -> bool:
    """As `isinstance`, without asking the thing for its `__class__`: that may be code of the user's."""
    return issubclass(type(thing), kind)


def words(objects: Sequence[Any], root: str) -> list[str]:
    """The links from `root`, which names the first object, down to the last object, which gets no link of its own.

    Attributes that follow the root belong to its name: `fit() local 'self.history'`.
    """
    links = [root]
    position = 0
    while position < len(objects) - 1:
        used, attribute, text = _step(objects[position : position + 4])
        position += used
        if attribute and len(links) == 1 and root.endswith("'"):
            links[0] = f"{links[0][:-1]}.{attribute}'"
        elif attribute:
            owner = type(objects[position - used]).__name__
            links.append(f"{owner}.{attribute}")
        elif text and text != links[-1]:  # a traceback of five frames is one word
            links.append(text)
    return links


def _step(objects: Sequence[Any]) -> tuple[int, str, str]:
    """How many objects the next link goes down, and the attribute or else the words for it."""
    holder, child = objects[0], objects[1]
    below = objects[2] if len(objects) > 2 else None
    if is_a(holder, FunctionType):
        return _from_function(holder, child, objects)
    if is_a(holder, dict):
        return 1, "", f"dict[{key_of(holder, child)}]"
    if is_a(holder, (list, tuple, deque)):
        return 1, "", f"{type(holder).__name__}[{next((i for i, item in enumerate(holder) if item is child), '?')}]"
    if is_a(holder, (set, frozenset)):
        return 1, "", type(holder).__name__
    if is_a(holder, (MethodType, BuiltinMethodType)):
        return 1, "", f"method {holder.__name__}()"
    if is_a(holder, functools.partial):
        return 1, "", f"partial({getattr(holder.func, '__name__', '?')})"
    if is_a(holder, CellType):
        return 1, "", "closure"
    if is_a(holder, (FrameType, GeneratorType)):
        return 1, "", in_frame(holder, child)
    attributes = attributes_of(holder)
    if attributes is child and below is not None:  # its __dict__ is an object of its own
        return _attribute(2, _name_in(child, below), below, objects[3] if len(objects) > 3 else None)
    name = next((name for name, value in attributes.items() if value is child), "") or _slot_of(holder, child)
    return _attribute(1, name, child, below) if name else (1, "", type(holder).__name__)


def _attribute(used: int, name: str, value: Any, below: Any) -> tuple[int, str, str]:
    if is_a(value, dict) and below is not None:
        if name in _CHILDREN:
            return used + 1, _name_in(value, below), ""
        if name in _HOOKS:
            return used + 1, "", _HOOKS[name]
    return used, name, ""


def _from_function(function: FunctionType, child: Any, objects: Sequence[Any]) -> tuple[int, str, str]:
    name = called(function.__code__)
    cells = function.__closure__
    if cells is not None and child is cells and len(objects) > 2:
        index = next((i for i, cell in enumerate(cells) if cell is objects[2]), -1)
        variable = function.__code__.co_freevars[index] if index >= 0 else "?"
        return min(3, len(objects) - 1), "", f"{name} closure '{variable}'"
    if child is function.__defaults__:
        return 1, "", f"{name} default arguments"
    return 1, "", name


def in_frame(holder: FrameType | GeneratorType[Any, Any, Any], child: Any) -> str:
    """A variable of a function that is suspended, or has ended but is kept by a traceback."""
    frame = holder if isinstance(holder, FrameType) else holder.gi_frame
    code = frame.f_code if frame is not None else holder.gi_code if isinstance(holder, GeneratorType) else None
    name = next((name for name, number in local_ids(frame) if number == id(child)), "") if frame is not None else ""
    kind = "frame of" if isinstance(holder, FrameType) else "generator"
    return f"{kind} {called(code) if code else '?'}" + (f" local '{name}'" if name else "")


def attributes_of(holder: Any) -> dict[str, Any]:
    """The instance's own attributes, without running any of the user's code."""
    try:
        found = object.__getattribute__(holder, "__dict__")
    except Exception:  # slots, or made in C
        return {}
    return found if is_a(found, dict) else {}


def _slot_of(holder: Any, child: Any) -> str:
    for owner in type(holder).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if is_a(slots, str) else tuple(slots):
            try:
                if owner.__dict__[name].__get__(holder, type(holder)) is child:
                    return str(name)
            except Exception:  # not set, or mangled
                continue
    return ""


def _name_in(attributes: dict[Any, Any], child: Any) -> str:
    return next((str(key) for key, value in attributes.items() if value is child), "?")


def key_of(holder: dict[Any, Any], child: Any) -> str:
    """The key as the program would write it, where that is short and certain."""
    for key, value in holder.items():
        if value is child:
            return _short(repr(key)) if is_a(key, (str, int, float, bool, bytes, tuple)) else type(key).__name__
    return "a key"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_KEY else text[: _MAX_KEY - 1] + "…"
