"""The run of a model, whose outputs must be as declared: in a server, and in this process.

Copied beside ``model.py``, as ``sonic_outputs.py``; it imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sonic_coffea.server.repository.formats import Runner, Tensor


def run_declared(
    run: Runner, feed: Mapping[str, Any], requested: Sequence[str], declared: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Run a model, and return the requested outputs.

    Requests and responses hold strings as bytes. Models take them as text, and may return either.

    Raises
    ------
    ValueError
        If an output is not there, or has another shape or dtype than declared.
    TypeError
        If strings are declared, and an output holds other objects.
    """
    texts = {n: _each(bytes.decode, t) if t.dtype == np.object_ else t for n, t in feed.items()}
    returned = run(texts, tuple(requested))
    outputs = {}
    for name in requested:
        if name not in returned:
            names = ", ".join(map(repr, returned)) or "nothing"
            raise ValueError(f"output {name!r} is declared, but the model returned {names}")
        array, spec = np.asarray(returned[name]), declared[name]
        is_text = array.dtype.kind in "OSU"
        dtype = "bytes" if is_text else array.dtype.name
        fits = len(array.shape) == len(spec["shape"]) and all(
            want in (-1, have) for want, have in zip(spec["shape"], array.shape, strict=True)
        )
        if not fits or dtype != spec["dtype"].replace("object", "bytes"):
            raise ValueError(
                f"output {name!r} is declared {spec['dtype']} {spec['shape']}, "
                f"but the model returned {dtype} {list(array.shape)}"
            )
        outputs[name] = _each(_encoded, array) if is_text else np.ascontiguousarray(array)
    return outputs


def _encoded(value: Any) -> bytes:
    # Triton would write None and numbers as text.
    if not isinstance(value, str | bytes):
        raise TypeError(f"expected strings as declared, but the model returned {value!r}")
    return value.encode() if isinstance(value, str) else value


def _each(function: Callable[[Any], Any], array: Any) -> Any:
    return np.vectorize(function, otypes=[np.object_])(array)
