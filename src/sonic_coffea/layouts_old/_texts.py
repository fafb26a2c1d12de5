"""Strings: numbers for kernels, bytes in requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import awkward as ak
import ml_dtypes
import numpy as np
from awkward.contents import Content, IndexedArray, ListOffsetArray, NumpyArray
from awkward.index import Index64

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old._fields import Feature, Source
from sonic_coffea.layouts_old._nodes import read
from sonic_coffea.layouts_old._paths import path_of
from sonic_coffea.layouts_old._rows import Int64, offsets_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

TEXT = np.dtype(object)
"""The type of tensors of strings: each is of type bytes."""

_STRINGS = frozenset({"string", "bytestring"})


def dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the type that a declaration names; numpy has no bfloat16, and no such strings."""
    if isinstance(dtype, str) and dtype in ("string", "bfloat16"):
        return TEXT if dtype == "string" else np.dtype(ml_dtypes.bfloat16)
    return TEXT if dtype is str else np.dtype(dtype)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a type as a declaration has it."""
    return "string" if dtype == TEXT else dtype.name


class Texts:
    """Different strings, each with a number; the `first` ones have the first numbers."""

    def __init__(self, first: Sequence[str | bytes] = ()) -> None:
        self._numbers: dict[bytes, int] = {}
        self._table = np.zeros(0, TEXT)
        self.numbers_of(first)

    def numbers_of(self, strings: Iterable[str | bytes]) -> Int64:
        """Return the number of each string; a new string gets the next number."""
        known = self._numbers
        each = (s.encode() if isinstance(s, str) else s for s in strings)
        return np.asarray([known.setdefault(s, len(known)) for s in each], np.int64)

    def numbered(self, tensor: NDArray[Any]) -> Int64:
        """Return a tensor of strings as one of their numbers."""
        return self.numbers_of(tensor.reshape(-1).tolist()).reshape(tensor.shape)

    def tensor(self, numbers: Int64) -> NDArray[Any]:
        """Return the strings of some numbers."""
        if len(self._table) < len(self._numbers):
            table = np.empty(len(self._numbers), TEXT)
            table[:] = list(self._numbers)
            self._table = table
        strings: NDArray[Any] = self._table[numbers]
        return strings

    @property
    def longest(self) -> int:
        """The bytes of the longest string."""
        return max(map(len, self._numbers), default=0)

    def content(self, numbers: Content) -> Content:
        """Return an array with strings in the place of their numbers.

        Raises
        ------
        UnicodeDecodeError
            If they are no UTF-8.
        """
        whole = b"".join(self._numbers)
        for string in self._numbers:
            string.decode()
        offsets = offsets_of(np.asarray([len(s) for s in self._numbers], np.int64))
        chars = NumpyArray(np.frombuffer(whole, np.uint8), parameters={"__array__": "char"})
        strings = ListOffsetArray(Index64(offsets), chars, parameters={"__array__": "string"})

        def placed(node: Content, **_: Any) -> Content | None:
            if not node.is_numpy:
                return None
            index = Index64(np.asarray(read(node), np.int64))
            return IndexedArray(index, strings).project()

        result: Content = ak.transform(placed, numbers, highlevel=False, numpy_to_regular=True)
        return result


class Numbered(Source):
    """Arrays whose strings are numbers, in the fields that `features` read."""

    def __init__(self, source: Source, features: Sequence[Feature], texts: Texts) -> None:
        self._source, self._texts = source, texts
        self._strings = {path_of(feature.name).column for feature in features}

    def collection(self, path: str) -> tuple[Content | None, str]:
        return (None, path) if path in self._strings else self._source.collection(path)

    def column(self, path: str) -> Content:
        column = self._source.column(path)
        if path not in self._strings:
            return column

        def numbered(node: Content, **_: Any) -> Content | None:
            if node.parameter("__array__") in _STRINGS:
                return NumpyArray(self._texts.numbers_of(_strings(node)))
            if node.is_numpy:
                raise InputError(
                    f"field {path!r} holds {node.dtype} where strings are sent; expected strings, "
                    "or a layout of numbers"
                )
            return None

        result: Content = ak.transform(numbered, column, highlevel=False)
        return result


def _strings(node: Content) -> list[bytes]:
    """Return the strings of an array of strings."""
    lists = node.to_ListOffsetArray64(start_at_zero=True)
    offsets = read(lists.offsets).tolist()
    whole = np.ascontiguousarray(read(lists.content)).tobytes()
    return [whole[start:stop] for start, stop in pairwise(offsets)]
