"""Parameters that requests carry besides tensors."""

from __future__ import annotations

from collections.abc import Mapping

from sonic_coffea.errors import ConfigError


def parameters_of(
    model: str,
    parameters: Mapping[str, bool | int | float | str],
    priority: int | None,
    server_timeout_s: float | None,
) -> tuple[tuple[str, bool | int | float | str], ...]:
    """Return the parameters of each request, as Triton names them; refuse what it cannot have."""
    for name, value in parameters.items():
        if name in _RESERVED:
            raise ConfigError(f"model {model!r}: parameter {name!r} is not free; {_RESERVED[name]}")
        if type(value) not in (bool, int, float, str):
            raise ConfigError(
                f"model {model!r}, parameter {name!r}: expected a bool, int, float or str, got "
                f"{type(value).__name__}"
            )
    carried = list(parameters.items())
    if priority is not None:
        if type(priority) is not int or priority < 1:
            raise ConfigError(
                f"model {model!r}: expected a priority of 1 or more, got {priority!r}"
            )
        carried.append(("priority", priority))
    if server_timeout_s is not None:
        if not 0 < server_timeout_s < _LONGEST_S:
            raise ConfigError(
                f"model {model!r}: expected server_timeout_s above 0 s, got {server_timeout_s!r}"
            )
        carried.append(("timeout", max(1, round(server_timeout_s * 1e6))))
    return tuple(carried)


_LONGEST_S = 1e9
_SEQUENCES = "rows are scored each by itself, and sequences are not supported"
_RESERVED = {
    "priority": "declare priority=",
    "timeout": "declare server_timeout_s=",
    **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), _SEQUENCES),
    **dict.fromkeys(("headers", "binary_data_output"), "the protocol has it"),
}
"""Parameters that mean something to Triton itself."""
