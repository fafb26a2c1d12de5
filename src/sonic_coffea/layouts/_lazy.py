"""Models on dask-awkward arrays: a graph is built, and each partition is scored when it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sonic_coffea.errors import InputError


def is_lazy(arrays: Any) -> bool:
    """Whether arrays, or any of a dict, are dask-awkward's."""
    each = arrays.values() if isinstance(arrays, dict) else [arrays]
    # No need to import it for those who do not use it.
    return any(type(a).__module__.partition(".")[0] == "dask_awkward" for a in each)


def over_partitions(function: Callable[[Any], Any], arrays: Any, *, label: str, token: str) -> Any:
    """Apply a function of arrays to every partition.

    Parameters
    ----------
    function : callable
        Of an array, or of a dict of arrays; also of typetracers.
    arrays : dask_awkward.Array or dict
        One array, or a dict of arrays with the same partitions.
    label : str
        What dask calls the task.
    token : str
        What tells this function from others with this label.

    Raises
    ------
    InputError
        If only some of the arrays are lazy.
    """
    import dask_awkward
    from dask.base import tokenize

    each = (arrays,)
    if isinstance(arrays, dict):
        for name, array in arrays.items():
            if not is_lazy(array):
                raise InputError(f"array {name!r} is not lazy, as others are; compute all or none")
        function, each = partial(_of_dict, function, tuple(arrays)), tuple(arrays.values())
    key = tokenize(token, *(array.name for array in each))
    return dask_awkward.map_partitions(function, *each, label=label, token=key)


def _of_dict(function: Callable[[Any], Any], names: tuple[str, ...], *arrays: Any) -> Any:
    return function(dict(zip(names, arrays, strict=True)))
