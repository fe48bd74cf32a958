"""The training process was killed by a signal inside of native code.

What it finds    SIGILL, SIGSEGV, SIGBUS, SIGFPE or SIGABRT: the process dies without an exception and without a Python traceback.
Why it matters   the run is over, and the shell prints no more than "Illegal instruction" or "Segmentation fault".
How it knows     under sonde run, Python's faulthandler writes the signal and the Python stack into the run's directory; sonde diagnose
                 reads it there.
Known problems   sonde.watch does not change signal handlers and records nothing; nor does sonde run where faulthandler is enabled already
                 (PYTHONFAULTHANDLER, -X dev). SIGKILL, which the kernel sends when memory runs out, cannot be recorded: such a run is only
                 "killed". That an illegal instruction inside of torch is AMX is likely, not certain: sonde doctor tries it.
Fix              SIGILL in torch: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported. Otherwise look at the native code that
                 the line calls: an extension built for another processor or another torch, a full /dev/shm, an index out of range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated

MAX_TEXT = 300  # characters of a name that come from the file: longer ones are no paths of code
MAX_LINES = 1000  # lines of source that are remembered: a run notes some dozens

FIXES = {
    "SIGILL": "a compiled library was built for another processor: install a build for this one, or compile it on this machine",
    "SIGSEGV": "native code used memory that is not its own: look at the extension that the line calls, at indices that go into it, "
    "and at libraries that were built for another version of torch",
    "SIGBUS": "a mapped file became shorter, or shared memory is full: check the file, and /dev/shm (docker run --shm-size=8g)",
    "SIGFPE": "native code divided an integer by zero: look at sizes and divisors of zero that go into the line",
    "SIGABRT": "native code gave up by itself: its own message is among the last lines on stderr",
}
TORCH_SIGILL = (
    "if the model computes in bfloat16, the processor probably claims instructions that it traps on, as some virtual machines do with AMX: "
    "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported (sonde doctor tries it). "
    "Otherwise install a build of the library for this processor"
)


@dataclass(slots=True)
class FatalSignalRule:
    name: ClassVar[str] = "fatal-signal"
    explains: ClassVar[tuple[str, ...]] = ()

    num_steps: int = 0
    step: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)  # "train.py:41" -> its text, as the run noted it

    def see(self, step: Step) -> None:
        self.num_steps += 1
        for event in step.events:
            if event.kind == "fatal_signal" and self.step < 0:
                self.step, self.data = event.step, dict(event.data)
            elif event.kind == "source" and len(self.lines) < MAX_LINES:
                self.lines.setdefault(str(event.data.get("line", "")), str(event.data.get("text", "")))

    def answer(self) -> Answer:
        if self.step < 0:
            return Clear() if self.num_steps else NotEvaluated("no step was seen")
        evidence: dict[str, float | str] = {}
        if source := self._text("source"):
            evidence |= {"source": source, "source_text": self.lines.get(source, "")}
        if function := self._text("function"):
            evidence["function"] = function
        if inside := self._inside():
            evidence["inside"] = inside
        return [Finding(self.name, Severity.CRITICAL, "", self.step, self._cause(), self._fix(), evidence)]

    def _cause(self) -> str:
        meaning = f" ({self._text('meaning')})" if self._text("meaning") else ""
        source = f" at {self._text('source')}" if self._text("source") else ""
        inside = f", inside of {self._package()}" if self._text("inside") else ""
        return f"the process was killed by {self._signal()}{meaning}{source}{inside}, in step {self.step}; it raised no exception"

    def _fix(self) -> str:
        # A function of torch that is written in C has no Python frame: a line of the user's own may have called it.
        if self._signal() == "SIGILL" and self._package() in ("torch", ""):
            return TORCH_SIGILL
        return FIXES.get(self._signal(), "look at the native code that this line calls")

    def _signal(self) -> str:
        return self._text("signal") or "a signal"

    def _package(self) -> str:
        return self._text("inside").replace("\\", "/").partition("/")[0].removesuffix(".py")

    def _inside(self) -> str:
        if not self._text("inside"):
            return ""
        return f"{self._text('inside')}:{self._text('inside_line')} in {self._text('inside_function')}"

    def _text(self, key: str) -> str:
        return str(self.data.get(key, ""))[:MAX_TEXT]
