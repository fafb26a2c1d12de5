"""Models on dask-awkward arrays, and layouts on arrays without data.

A graph is built, and each partition is scored when it runs. awkward's typetracers stand for the
arrays meanwhile, and when coffea looks for the branches that a processor needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import awkward as ak
from awkward.contents import UnmaskedArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._batch import bind_inputs
from sonic_coffea.layouts._scores import Outputs

if TYPE_CHECKING:
    from sonic_coffea.layouts._layout import Layout
    from sonic_coffea.layouts._output import Output


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


def trace(
    layouts: Mapping[str, Layout],
    outputs: Mapping[str, Output],
    arrays: Any,
    *,
    optional: bool = False,
) -> ak.Array:
    """Touch the fields that layouts read, and return what stands for the scores.

    Parameters
    ----------
    layouts : mapping
        Input names and their layouts.
    outputs : mapping
        Output names, and what they are.
    arrays : awkward array or dict
        As in `bind_inputs`, without data.
    optional : bool
        Whether scores may be None where objects are not.

    Raises
    ------
    FieldError, InputError
        If a field is missing, or has no axis where one is needed.
    """
    inputs = bind_inputs(layouts, arrays)
    content = Outputs.of(outputs, inputs).content(optional=True)
    scores = inputs.rows.unflatten(UnmaskedArray.simplified(content) if optional else content)
    return ak.Array(scores.layout.to_typetracer(forget_length=True))
