"""Describes how one object refers to another, as the program would write it: an index, a key, an attribute, a closure."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from types import BuiltinMethodType, CellType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple

from sonde.leaks.local_variables import function_name, local_ids

_MODULE_DICTS = {"_modules", "_parameters", "_buffers"}  # of torch.nn.Module: their entries are attributes of the module to its user
_HOOK_DICTS = {
    "_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook", "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}  # fmt: skip
_MAX_KEY = 40  # characters of a key that are shown


class _Link(NamedTuple):
    """A step down a path: the number of objects that it covers, and either an attribute or a description."""

    text: str = ""
    attribute: str = ""
    num_objects: int = 1


def is_a(thing: Any, kind: type | tuple[type, ...]) -> bool:
    """As `isinstance`, without reading `__class__` of the object: that may run the user's code."""
    return issubclass(type(thing), kind)


def describe_path(objects: Sequence[Any], root: str) -> list[str]:
    """The links from `root`, the name of the first object, down to the last object, which gets no link of its own. Attributes that follow
    the root become a part of its name: `fit() local 'self.history'`."""
    links = [root]
    position = 0
    while position < len(objects) - 1:
        link = _describe_link(objects[position : position + 4])
        if link.attribute and len(links) == 1 and root.endswith("'"):
            links[0] = f"{links[0][:-1]}.{link.attribute}'"
        elif link.attribute:
            links.append(f"{type(objects[position]).__name__}.{link.attribute}")
        elif link.text and link.text != links[-1]:  # a traceback of five frames is one link
            links.append(link.text)
        position += link.num_objects
    return links


def _describe_link(objects: Sequence[Any]) -> _Link:
    """The link from the first object to the second, or further if objects between them are not visible to the user."""
    holder, child = objects[0], objects[1]
    below = objects[2] if len(objects) > 2 else None
    if is_a(holder, FunctionType):
        return _link_from_function(holder, child, objects)
    if is_a(holder, dict):
        return _Link(f"dict[{key_of(holder, child)}]")
    if is_a(holder, (list, tuple, deque)):
        return _Link(f"{type(holder).__name__}[{next((i for i, item in enumerate(holder) if item is child), '?')}]")
    if is_a(holder, (MethodType, BuiltinMethodType)):
        return _Link(f"method {holder.__name__}()")
    if is_a(holder, functools.partial):
        return _Link(f"partial({getattr(holder.func, '__name__', '?')})")
    if is_a(holder, CellType):
        return _Link("closure")
    if is_a(holder, (FrameType, GeneratorType)):
        return _Link(describe_frame_variable(holder, child))
    attributes = _attributes(holder)
    if attributes is child and below is not None:  # the path contains the __dict__ of the object
        return _link_to_attribute(2, _attribute_name(child, below), below, objects[3] if len(objects) > 3 else None)
    name = _attribute_name(attributes, child, "") or _slot_name(holder, child)
    return _link_to_attribute(1, name, child, below) if name else _Link(type(holder).__name__)


def _link_to_attribute(num_objects: int, name: str, value: Any, below: Any) -> _Link:
    if is_a(value, dict) and below is not None and name in _MODULE_DICTS:
        return _Link("", _attribute_name(value, below), num_objects + 1)
    if is_a(value, dict) and below is not None and name in _HOOK_DICTS:
        return _Link(_HOOK_DICTS[name], "", num_objects + 1)
    return _Link("", name, num_objects)


def _link_from_function(function: FunctionType, child: Any, objects: Sequence[Any]) -> _Link:
    name = function_name(function.__code__)
    cells = function.__closure__
    if cells is not None and child is cells and len(objects) > 2:
        index = next((i for i, cell in enumerate(cells) if cell is objects[2]), -1)
        variable = function.__code__.co_freevars[index] if index >= 0 else "?"
        return _Link(f"{name} closure '{variable}'", "", min(3, len(objects) - 1))
    return _Link(f"{name} default arguments" if child is function.__defaults__ else name)


def describe_frame_variable(holder: FrameType | GeneratorType[Any, Any, Any], child: Any) -> str:
    """The variable of a suspended generator, or of an ended function whose frame a traceback holds."""
    frame = holder if isinstance(holder, FrameType) else holder.gi_frame
    code = frame.f_code if frame is not None else holder.gi_code if isinstance(holder, GeneratorType) else None
    name = next((name for name, object_id in local_ids(frame) if object_id == id(child)), "") if frame is not None else ""
    kind = "frame of" if isinstance(holder, FrameType) else "generator"
    return f"{kind} {function_name(code) if code else '?'}" + (f" local '{name}'" if name else "")


def key_of(holder: dict[Any, Any], child: Any) -> str:
    """The key of `child` as the program would write it, shortened; its type if the repr could run the user's code."""
    for key, value in holder.items():
        if value is child:
            text = repr(key) if is_a(key, (str, int, float, bool, bytes, tuple)) else type(key).__name__
            return text if len(text) <= _MAX_KEY else text[: _MAX_KEY - 1] + "…"
    return "a key"


def _attributes(holder: Any) -> dict[str, Any]:
    """The instance's own attributes, read without running the user's code."""
    try:
        found = object.__getattribute__(holder, "__dict__")
    except Exception:  # slots, or implemented in C
        return {}
    return found if is_a(found, dict) else {}


def _slot_name(holder: Any, child: Any) -> str:
    for owner in type(holder).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if is_a(slots, str) else tuple(slots):
            try:
                if owner.__dict__[name].__get__(holder, type(holder)) is child:
                    return str(name)
            except Exception:  # not set, or mangled
                continue
    return ""


def _attribute_name(attributes: dict[Any, Any], child: Any, default: str = "?") -> str:
    return next((str(key) for key, value in attributes.items() if value is child), default)
