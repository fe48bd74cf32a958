"""Synchronization points: where Python reads the numbers of a tensor (`.item()`, `.cpu()`, `.tolist()`, `.numpy()`, `float()`, `print`).

On a device each of these waits for all queued work. The methods are patched during a profiled step; a call that a library makes for its own
purposes does not count.
"""

from typing import Any

from sonde.capture.tensor_method_patch import MethodCall, TensorMethodPatch
from sonde.capture.user_source_line import describe_line, direct_user_frame

DISPLAY_NAMES = {
    "__float__": "float()", "__int__": "int()", "__bool__": "bool()", "__index__": "int()", "__array__": "numpy()", "__repr__": "print",
    "__format__": "print",
}  # fmt: skip
NAMES = ("item", "tolist", "cpu", "numpy", *DISPLAY_NAMES)
MAX_LINES = 64


class SyncPoints:
    """Records synchronization points between `start` and `stop`, in one thread."""

    def __init__(self) -> None:
        self._patch = TensorMethodPatch(NAMES, self._on_call)
        self._calls: dict[tuple[str, int, str], list[Any]] = {}  # nanoseconds, number, line and text

    def start(self) -> None:
        self._calls = {}
        self._patch.start()

    def stop(self) -> list[dict[str, Any]]:
        """Calls of one kind at one line, longest first."""
        self._patch.stop()
        self._patch.check()
        found = [
            {"line": line, "text": text, "call": call, "num": num, "ms": ns / 1e6}
            for (_, _, call), (ns, num, (line, text)) in self._calls.items()
        ]
        self._calls = {}
        return sorted(found, key=lambda point: -point["ms"])

    def _on_call(self, call: MethodCall) -> None:
        frame = direct_user_frame(call.frame)
        if frame is None:
            return
        name = DISPLAY_NAMES.get(call.name, f".{call.name}()")
        key = (frame.f_code.co_filename, frame.f_lineno, name)
        if key not in self._calls and len(self._calls) < MAX_LINES:
            self._calls[key] = [0, 0, describe_line(frame)]
        if key in self._calls:
            self._calls[key][0] += call.ns
            self._calls[key][1] += 1
