"""Rows that are not sent: those that are like others of the call, or were scored before."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import xxhash

from sonic_coffea.errors import ConfigError, InputError, SonicError
from sonic_coffea.layouts import is_lazy, is_tracer
from sonic_coffea.pool import Call

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.layouts import Assembly, Inputs
    from sonic_coffea.pool import Pool
    from sonic_coffea.reuse._cache import ScoreCache
    from sonic_coffea.transport import Contract

__all__ = ["Part", "Repeats", "Reuse", "Sink", "Variations", "keys_of"]

_BLOCK = 4096


class Variations(dict[str, Any]):
    """The same objects under systematic variations, to be scored in one call.

    Rows that a variation does not change are sent once. The scores come back as a dict of arrays,
    each in the structure of its variation. Those of dask-awkward arrays are scored one by one.

    Parameters
    ----------
    collections : mapping, optional
        Name to objects: an awkward array, or a dict with one for each input of the model. They may
        have other objects, as cuts differ, but the same fields.
    **named
        More of them.

    Examples
    --------
    >>> import awkward as ak
    >>> import sonic_coffea as sonic
    >>> jets = ak.Array([[{"pt": 50.0}, {"pt": 40.0}], []])
    >>> up = ak.with_field(jets, jets.pt * 1.02, "pt")
    >>> list(sonic.Variations(nominal=jets, up=up))
    ['nominal', 'up']
    """

    @property
    def deferred(self) -> bool:
        """Whether they have no data yet: lazy arrays, or typetracers.

        Raises
        ------
        sonic_coffea.errors.InputError
            If only some have none.
        """
        without = {name for name, one in self.items() if is_lazy(one) or is_tracer(one)}
        for name in self:
            if without and name not in without:
                raise InputError(
                    f"variation {name!r} is not lazy, as others are; compute all or none"
                )
        return bool(without)

    def together(self) -> tuple[Any, dict[str, int]]:
        """Return all of them, one after another, and how many events each has.

        Raises
        ------
        sonic_coffea.errors.InputError
            If there are none, or they do not have the same fields.
        """
        if not self:
            raise InputError("expected at least one variation, got none")
        first = next(iter(self.values()))
        if isinstance(first, dict):
            for name, one in self.items():
                if not isinstance(one, dict) or one.keys() != first.keys():
                    raise InputError(f"variation {name!r} has other inputs than the first")
            joined = {key: self._joined({n: one[key] for n, one in self.items()}) for key in first}
            lengths = {name: len(next(iter(one.values()))) for name, one in self.items()}
            return joined, lengths
        return self._joined(self), {name: len(one) for name, one in self.items()}

    @staticmethod
    def _joined(arrays: Mapping[str, Any]) -> ak.Array:
        first = next(iter(arrays.values()))
        for name, one in arrays.items():
            if set(one.fields) != set(first.fields):
                odd = ", ".join(sorted(set(one.fields) ^ set(first.fields)))
                raise InputError(f"variation {name!r} has other fields than the first: {odd}")
        # In the order of the first, and with its methods; columns alone would lose them.
        return ak.concatenate(
            [one if one.fields == first.fields else one[first.fields] for one in arrays.values()]
        )


@dataclass(frozen=True, slots=True)
class Reuse:
    """Whether rows that are the same are sent once, and where scores are kept."""

    deduplicate: bool = False
    cache: ScoreCache | None = None


def keys_of(inputs: Inputs, scope: str) -> list[bytes]:
    """Return a key for each row: a hash of 128 bits of what would be sent for it.

    Two rows that differ have the same one by a chance of 10^-38, so that among 10^9 rows there is
    such a pair by one of 10^-21.

    Parameters
    ----------
    inputs : Inputs
        The rows.
    scope : str
        What else sets a row apart, such as the model.

    Raises
    ------
    ConfigError
        If rows have no tensors of their own.
    """
    keys: list[bytes] = [b""] * len(inputs.rows)
    for segment in inputs.segments:
        for start in range(segment.start, segment.stop, _BLOCK):
            stop = min(start + _BLOCK, segment.stop)
            rows = stop - start
            tensors = inputs.pack(start, stop)
            whole = [name for name, t in tensors.items() if t.ndim == 0 or len(t) != rows]
            if whole:
                raise ConfigError(
                    f"rows of input {whole[0]!r} travel as one graph, and are not told apart; "
                    "leave deduplicate and cache out"
                )
            about = [(name, t.dtype.str, t.shape[1:]) for name, t in tensors.items()]
            head = xxhash.xxh3_128_digest(f"{scope} {about}".encode())
            parts = [
                np.ascontiguousarray(t).reshape(rows, -1).view(np.uint8) for t in tensors.values()
            ]
            packed = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
            width, view = packed.shape[1], np.ascontiguousarray(packed).data.cast("B")
            numbers = np.arange(len(inputs.rows))[inputs.selection(start, stop)]
            for place, row in enumerate(numbers.tolist()):
                one = xxhash.xxh3_128(head)
                one.update(view[place * width : (place + 1) * width])
                keys[row] = one.digest()
    return keys


class Repeats:
    """Which row stands for each.

    Parameters
    ----------
    keys : sequence of bytes
        By row; rows with the same one are the same.
    among : array of int64
        The rows that it is about.
    """

    def __init__(self, keys: Sequence[bytes], among: NDArray[np.int64]) -> None:
        first: dict[bytes, int] = {}
        stands = np.asarray([first.setdefault(keys[row], row) for row in among.tolist()], np.int64)
        self.rows = np.fromiter(first.values(), np.int64, len(first))
        order = np.argsort(stands, kind="stable")
        self._members, self._stands = among[order], stands[order]

    def members(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return all rows that some stand for."""
        return self.expand(rows)[0]

    def expand(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all rows that some stand for, and the place in `rows` of that which does."""
        start = np.searchsorted(self._stands, rows, "left")
        counts = np.searchsorted(self._stands, rows, "right") - start
        places = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._members[start[places] + within], places


class Sink:
    """Where the answers of a call's rows go: to all that they stand for, in each output.

    Parameters
    ----------
    outputs : mapping
        What puts the answers together; calls to several versions of a model share it.
    lock : Lock
        Guards it.
    repeats : Repeats, optional
        Which rows stand for others.
    keeps : bool
        Whether answers are kept, for `remember`.
    """

    def __init__(
        self,
        outputs: Mapping[str, Assembly],
        lock: threading.Lock,
        repeats: Repeats | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._outputs = outputs
        self._lock = lock
        self._repeats = repeats
        self._keeps = keeps
        self._kept: list[tuple[NDArray[np.int64], dict[str, NDArray[Any]]]] = []

    def place(self, wanted: Any, rows: int, answer: Mapping[str, NDArray[Any]]) -> None:
        """Put the answer for some rows in its places."""
        everywhere, count, spread = wanted, rows, answer
        # An answer of another length is not what was declared, which the outputs will say.
        if self._repeats is not None and all(t.ndim and len(t) == rows for t in answer.values()):
            everywhere, places = self._repeats.expand(wanted)
            count = len(everywhere)
            if count > rows:
                spread = {name: tensor[places] for name, tensor in answer.items()}
            else:
                everywhere = wanted
        with self._lock:
            for output in self._outputs.values():
                output.place(everywhere, count, spread)
            if self._keeps:
                self._kept.append((wanted, {name: np.array(t) for name, t in answer.items()}))

    @property
    def keeps_some(self) -> bool:
        """Whether there is something to be kept."""
        return bool(self._kept)

    def recall(
        self, cache: ScoreCache, keys: Sequence[bytes], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Place the scores that a cache has, and return which of `rows` it has not."""
        found = cache.get([keys[row] for row in rows.tolist()])
        known = np.fromiter((keys[row] in found for row in rows.tolist()), np.bool_, len(rows))
        for some, answer in _stacked(rows[known].tolist(), keys, found):
            self.place(some, len(some), answer)
        self._kept.clear()
        return rows[~known]

    def remember(self, cache: ScoreCache, keys: Sequence[bytes]) -> None:
        """Keep the answers in a cache: all that are alike in form at once, which is faster."""
        kept, self._kept = self._kept, []
        alike: dict[Any, list[tuple[NDArray[np.int64], dict[str, NDArray[Any]]]]] = {}
        for rows, answer in kept:
            form = tuple((name, t.dtype, t.shape[1:]) for name, t in answer.items())
            alike.setdefault(form, []).append((rows, answer))
        for members in alike.values():
            rows = np.concatenate([rows for rows, _ in members])
            names = members[0][1]
            answers = {name: np.concatenate([one[name] for _, one in members]) for name in names}
            cache.put([keys[row] for row in rows.tolist()], answers)


class Part:
    """The rows of a call that one version of a model scores.

    Parameters
    ----------
    contract : Contract
        The version's.
    inputs : Inputs
        The rows.
    outputs : mapping
        What puts the answers together; other parts may share it.
    lock : Lock
        Guards it.
    asked : list of str
        The outputs that requests ask for.
    version : str or None
        The version that was asked for.
    mask : bool
        Whether rows that servers lose are noted, instead of failing the call.
    reuse : Reuse
        Which rows need not be sent.
    pool : Pool
        Where they go.

    Attributes
    ----------
    call : Call
        What is to be submitted to a pool.
    """

    def __init__(
        self,
        contract: Contract,
        inputs: Inputs,
        outputs: Mapping[str, Assembly],
        lock: threading.Lock,
        *,
        asked: list[str],
        version: str | None,
        mask: bool,
        reuse: Reuse,
        pool: Pool,
    ) -> None:
        self._contract, self._pool, self._cache = contract, pool, reuse.cache
        self._keys: list[bytes] = []
        repeats, sent = None, inputs
        different = len(inputs)
        if reuse.deduplicate:
            # Without a checksum, the same name may be another model elsewhere.
            which = contract.digest or pool.settings.servers
            self._keys = keys_of(inputs, repr((contract.model, contract.version, which, asked)))
            repeats = Repeats(
                self._keys, np.arange(len(inputs.rows))[inputs.selection(0, len(inputs))]
            )
            different = len(repeats.rows)
        self._sink = Sink(outputs, lock, repeats, keeps=reuse.cache is not None)
        if repeats is not None:
            rows = repeats.rows
            if reuse.cache is not None:
                rows = self._sink.recall(reuse.cache, self._keys, rows)
            sent = inputs.only(rows)
        self.call = Call(
            contract,
            sent,
            {"": self._sink},
            asked,
            version=version,
            mask=mask,
            lost_with=repeats.members if repeats is not None else None,
        )
        statistics = self.call.statistics
        statistics.objects = len(inputs)
        statistics.repeated = len(inputs) - different
        statistics.cached = different - len(sent)
        if statistics.cached:
            self.call.served_versions.add(contract.version)
        kept, cut, padded = sent.count_elements()
        statistics.filled, statistics.truncated, statistics.padded = kept, cut, padded

    @property
    def caches(self) -> bool:
        """Whether there is a cache."""
        return self._cache is not None

    @property
    def keeps(self) -> bool:
        """Whether there is something to be kept."""
        return self._cache is not None and self._sink.keeps_some

    def keep(self) -> None:
        """Keep what has come so far, if it surely is of the version that it is kept for."""
        contract, call = self._contract, self.call
        if self._cache is None or not self.keeps:
            return
        # Not what a fallback gave, which may differ within its tolerance.
        servers = {server for (server, _, _), _ in call.statistics}
        if not servers <= set(self._pool.settings.servers):
            return
        with contextlib.suppress(SonicError):
            now = self._pool.contract(contract.model, call.version, anew=True)
            same = (now.version, now.digest) == (contract.version, contract.digest)
            if same and call.served_versions == {contract.version}:
                self._sink.remember(self._cache, self._keys)


def _stacked(
    rows: list[int], keys: Sequence[bytes], found: Mapping[bytes, Mapping[str, NDArray[Any]]]
) -> Iterable[tuple[NDArray[np.int64], dict[str, NDArray[Any]]]]:
    """Yield rows whose scores are alike in form, with their scores as one tensor each."""
    alike: dict[Any, list[int]] = {}
    for row in rows:
        form = tuple((name, t.dtype, t.shape) for name, t in found[keys[row]].items())
        alike.setdefault(form, []).append(row)
    for form, members in alike.items():
        answer = {name: np.stack([found[keys[row]][name] for row in members]) for name, *_ in form}
        yield np.asarray(members, np.int64), answer
