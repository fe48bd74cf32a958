"""The training process was killed by a signal inside of native code.

What it finds    SIGILL, SIGSEGV, SIGBUS, SIGFPE or SIGABRT: the process dies without an exception and without a Python traceback.
Why it matters   the run is over, and the shell prints no more than "Illegal instruction" or "Segmentation fault".
How it knows     under sonde run, Python's faulthandler writes the signal and the Python stack into the run's directory.
Known problems   sonde.watch does not change signal handlers and records nothing, nor does sonde run if faulthandler is enabled already.
                 SIGKILL (out of memory) cannot be recorded. That an illegal instruction in torch is AMX is likely, not certain: sonde
                 doctor tries it.
Fix              SIGILL in torch: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported. Otherwise check the native code that the
                 line calls: an extension built for another processor or another torch, a full /dev/shm, an index out of range.
"""

from sonde.events import CallSiteFound, FatalSignalReceived, Finding, Severity
from sonde.rules.rule import Clear, Result, Rule
from sonde.run_view import RunView

MAX_TEXT = 300  # characters of a name that come from the file: longer ones are no paths of code

FIXES = {
    "SIGILL": "a compiled library was built for another processor: install a build for this one, or compile it on this machine",
    "SIGSEGV": "native code used memory that is not its own: check the extension that the line calls, the indices that are passed to it, "
    "and libraries that were built for another version of torch",
    "SIGBUS": "a mapped file became shorter, or shared memory is full: check the file, and /dev/shm (docker run --shm-size=8g)",
    "SIGFPE": "native code divided an integer by zero: check sizes and divisors of zero that are passed on this line",
    "SIGABRT": "native code called abort(): its own message is among the last lines on stderr",
}
TORCH_SIGILL = (
    "if the model computes in bfloat16, the processor probably claims instructions that it traps on, as some virtual machines do with AMX: "
    "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported (sonde doctor tries it). "
    "Otherwise install a build of the library for this processor"
)


def check(view: RunView) -> Result:
    event = next(iter(view.events(FatalSignalReceived)), None)
    if event is None:
        return Clear()
    signal, meaning, source, function, file, inside_function = (
        text[:MAX_TEXT] for text in (event.signal, event.meaning, event.source, event.function, event.inside, event.inside_function)
    )
    package = file.replace("\\", "/").partition("/")[0].removesuffix(".py")
    evidence: dict[str, float | str] = {}
    if source:
        text = next((site.text for site in view.events(CallSiteFound) if site.line == source), "")
        evidence |= {"source": source, "source_text": text}
    if function:
        evidence["function"] = function
    if file:
        evidence["inside"] = f"{file}:{event.inside_line} in {inside_function}"
    cause = (
        f"the process was killed by {signal or 'a signal'}{f' ({meaning})' if meaning else ''}{f' at {source}' if source else ''}"
        f"{f', inside of {package}' if file else ''}, in step {event.step}; it raised no exception"
    )
    # A function of torch that is written in C has no Python frame: a line of the user's own may have called it.
    is_torch_sigill = signal == "SIGILL" and package in ("torch", "")
    fix = TORCH_SIGILL if is_torch_sigill else FIXES.get(signal, "check the native code that this line calls")
    return [Finding(RULE.name, Severity.CRITICAL, "", event.step, cause, fix, evidence)]


RULE = Rule("fatal-signal", check, page=__doc__)
