"""Kernels of common inputs, compiled ahead for all processors of a family."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    import awkward as ak

    from sonic_coffea.layouts_old._layout import Layout


def compile_ahead(inputs: Iterable[tuple[Layout, ak.Array]] | None = None) -> int:
    """Compile the kernels of inputs, by default of common ones, and return how many there are.

    Processes on all processors of the family load them, also where no disk can be written. This
    process compiles for the family from now on.

    Raises
    ------
    ConfigError
        If there is no family to compile for, or if the kernels cannot be saved.
    """
    from sonic_coffea.layouts_old import _kernels
    from sonic_coffea.layouts_old._machine_code import Kernel, family_of_numba, portable

    family = portable()
    if family is None:
        raise ConfigError("this processor is of no family that kernels are compiled for")
    if family_of_numba() != family:
        if "numba" in sys.modules:
            raise ConfigError("numba compiles for this processor alone, as it is loaded already")
        os.environ |= {"NUMBA_CPU_NAME": family, "NUMBA_CPU_FEATURES": ""}
    for layout, array in common() if inputs is None else inputs:
        layout.pack(array)
    kernels = [kernel for kernel in vars(_kernels).values() if isinstance(kernel, Kernel)]
    if any(kernel.unsaved for kernel in kernels):
        raise ConfigError("the kernels cannot be saved; NUMBA_CACHE_DIR names a folder for them")
    return sum(map(len, kernels))


def common() -> Iterator[tuple[Layout, ak.Array]]:
    """Yield layouts, and arrays as they come from files and from cuts."""
    import awkward as ak
    import numpy as np

    from sonic_coffea.layouts_old import Feature, Flat, Mask, Padded, Pairwise, Row

    names = ["pt", "eta"]
    numbers = np.arange(12, dtype=np.float32)
    columns = dict.fromkeys((*names, "phi", "mass"), numbers)
    columns |= {"charge": numbers.astype(np.int32)}
    candidates = ak.zip({name: ak.unflatten(c, [3, 1, 0, 4, 2, 2]) for name, c in columns.items()})
    jets = ak.unflatten(candidates, [2, 1, 3])
    clipped = [Feature(name, scale=2.0, shift=1.0, lower=-1.0, upper=1.0) for name in names]
    for lists in (jets, jets[ak.num(jets, axis=2) > 1], jets[jets.pt > 1]):
        for order in ("FL", "LF"):
            yield Padded(names, 4, axis_order=order), lists
            yield Padded(clipped, 4, axis_order=order), lists
            yield Padded([*names, "charge"], 4, axis_order=order), lists
        yield Mask(4, of="pt"), lists
        yield Flat(names), lists
        yield Pairwise(["pt", "eta", "phi", "mass"], 4), lists
    objects = ak.zip({name: ak.unflatten(column, [5, 0, 7]) for name, column in columns.items()})
    for some in (objects, objects[objects.pt > 1]):
        yield Row(names), some
        yield Row(clipped), some
        yield Row([*names, "charge"]), some
