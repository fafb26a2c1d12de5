"""What went wrong, out of a Triton log."""

from __future__ import annotations

import re

_ERROR = re.compile(r'^E\d{4} [\d:.]+ \d+ \S+\] "?(.*?)"?$')
_RECORD = re.compile(r"^[IWEF]\d{4} ")
_TABLE = re.compile(r"^[|+]")
_UNAVAILABLE = re.compile(r"UNAVAILABLE: (.*?)\s*\|?$")
_USAGE = "Usage: tritonserver"
_LONGEST = 2000
# Said by every server on a machine without a GPU.
_HARMLESS = ("CudaDriverHelper has not been initialized",)


def error_lines(log: str) -> list[str]:
    """Return the errors in a log, in order and without repeats; its end when it has none."""
    # A wrong argument is answered with every option there is, some 500 lines, and the reason is
    # before or after them.
    before, usage, after = log.partition(_USAGE)
    if usage:
        log = before if before.strip() else "\n".join(filter(str.strip, after.splitlines()[-3:]))
    errors: list[str] = []
    open_error = False
    for line in log.splitlines():
        match = _ERROR.match(line)
        if match and not match[1].startswith(_HARMLESS):
            errors.append(match[1].replace("\\n", "\n"))
            open_error = True
        elif _RECORD.match(line) or _TABLE.match(line) or not line.strip():
            open_error = False
            unavailable = _UNAVAILABLE.search(line)
            if unavailable:
                errors.append(unavailable[1].strip())
        elif open_error:
            errors[-1] += f"\n{line}"
    if not errors:
        errors = [line for line in log.splitlines() if line.strip()][-5:]
    return [text.strip()[:_LONGEST] for text in dict.fromkeys(errors)]


def port_is_taken(log: str) -> bool:
    """Whether the server gave up because something else listens on its port."""
    lowered = log.lower()
    return "address already in use" in lowered or "failed to bind" in lowered
