"""A processor's output that carries the statistics of its requests, beside the user's keys."""

from __future__ import annotations

from typing import Any

from sonic_coffea.reporting import Statistics


class Scored(dict[Any, Any]):
    """The dict that a processor returned, with ``statistics`` as an attribute.

    coffea adds outputs pairwise, over chunks and in trees; keys are added by coffea's own rules,
    statistics beside them.
    """

    statistics: Statistics

    def __init__(self, output: dict[Any, Any], statistics: Statistics) -> None:
        super().__init__(output)
        self.statistics = statistics

    def __add__(self, other: dict[Any, Any]) -> Scored:
        from coffea.processor.accumulator import add

        return Scored(add(dict(self), dict(other)), self.statistics + _statistics(other))

    def __radd__(self, other: dict[Any, Any]) -> Scored:
        from coffea.processor.accumulator import add

        return Scored(add(dict(other), dict(self)), self.statistics + _statistics(other))

    def __iadd__(self, other: dict[Any, Any]) -> Scored:
        from coffea.processor.accumulator import add

        self.update(add(dict(self), dict(other)))
        self.statistics = self.statistics + _statistics(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Scored, (dict(self), self.statistics)


def _statistics(output: dict[Any, Any]) -> Statistics:
    return output.statistics if isinstance(output, Scored) else Statistics()
