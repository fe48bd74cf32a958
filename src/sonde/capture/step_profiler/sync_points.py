"""Where Python asks a tensor for its numbers: `.item()`, `.cpu()`, `.tolist()`, `.numpy()`, `float()`, `print`.

On a device each of these waits until everything before it is computed. In the memory of the CPU nothing is waited for, and only the calls
themselves cost. They are listened to during a step that is looked at closely, and then taken out again; a call that a library makes for
its own purposes is not the user's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sonde.capture.call_site import describe_line
from sonde.capture.tensor_method_patches import Call, Listening, users_frame

NAMES = (
    "item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__repr__", "__format__",
)  # fmt: skip
SPOKEN = {
    "__float__": "float()", "__int__": "int()", "__bool__": "bool()", "__index__": "int()", "__array__": "numpy()", "__repr__": "print",
    "__format__": "print",
}  # fmt: skip
MAX_PLACES = 64


class Wait(NamedTuple):
    line: str
    text: str
    call: str  # ".item()", "print"
    num: int
    ms: float


class SyncPoints:
    """Between `start` and `stop`, in one thread."""

    def __init__(self) -> None:
        self._listening = Listening(NAMES, self._note)
        self._places: dict[tuple[str, int, str], list[Any]] = {}  # nanoseconds, number, how to say it

    def start(self) -> None:
        self._places = {}
        self._listening.start()

    def stop(self) -> list[Wait]:
        self._listening.stop()
        self._listening.check()
        found = [Wait(line, text, call, num, ns / 1e6) for (_, _, call), (ns, num, (line, text)) in self._places.items()]
        self._places = {}
        return sorted(found, key=lambda wait: -wait.ms)

    def _note(self, call: Call) -> None:
        frame = users_frame(call.frame)
        if frame is None:
            return
        spoken = SPOKEN.get(call.name, f".{call.name}()")
        key = (frame.f_code.co_filename, frame.f_lineno, spoken)
        known = self._places.get(key)
        if known is None:
            if len(self._places) >= MAX_PLACES:
                return
            known = self._places[key] = [0, 0, describe_line(frame)]
        known[0] += call.ns
        known[1] += 1
