"""The rows of a call that one version of a model scores, less those that need not be sent."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sonic_coffea.errors import SonicError
from sonic_coffea.pool import Call
from sonic_coffea.reuse._deduplication import Duplicates, keys_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.layouts import Assembly, Inputs, Int64
    from sonic_coffea.pool import Pool
    from sonic_coffea.reuse._cache import ScoreCache
    from sonic_coffea.transport import Contract

    Answer = Mapping[str, NDArray[Any]]


class Reuse(NamedTuple):
    """Whether equal rows are sent once, and where scores are kept."""

    deduplicate: bool = False
    cache: ScoreCache | None = None


class Sink:
    """Where the answers of a call's rows go: to all equal rows, in each output, and to the cache.

    Parameters
    ----------
    outputs, lock
        What puts the answers together, and its guard: calls to several versions share them.
    keys : mapping of int to bytes
        The key of each row; empty if rows are not deduplicated.
    cache : ScoreCache, optional
        Where scores are looked up by `recall`, and kept by `remember`.

    Attributes
    ----------
    kept : list
        Answers that `remember` will keep.
    """

    def __init__(
        self,
        outputs: Mapping[str, Assembly],
        lock: threading.Lock,
        keys: Mapping[int, bytes],
        cache: ScoreCache | None = None,
    ) -> None:
        self._outputs = outputs
        self._lock = lock
        self._keys = keys
        self._cache = cache
        self.kept: list[tuple[Int64, Answer]] = []
        self.duplicates = Duplicates(keys) if keys else None

    def place(self, selection: Any, rows: int, answer: Answer) -> None:
        """Put the answer for some rows in its places."""
        self._spread(selection, rows, answer)
        if self._cache is not None:
            # A copy, as the answer may lie in memory that is used again.
            copied = {name: np.array(tensor) for name, tensor in answer.items()}
            with self._lock:
                self.kept.append((selection, copied))

    def _spread(self, selection: Any, rows: int, answer: Answer) -> None:
        # An answer of another length is not what was declared, which the outputs will say.
        if self.duplicates is not None and all(t.ndim and len(t) == rows for t in answer.values()):
            members, places = self.duplicates.expand(selection)
            if len(members) > rows:
                selection, rows = members, len(members)
                answer = {name: tensor[places] for name, tensor in answer.items()}
        with self._lock:
            for output in self._outputs.values():
                output.place(selection, rows, answer)

    def recall(self, rows: Int64) -> Int64:
        """Place the scores of cache hits, and return the misses."""
        if self._cache is None:
            return rows
        hits = self._cache.get([self._keys[row] for row in rows.tolist()])
        alike: dict[Any, list[int]] = {}
        misses = []
        for row in rows.tolist():
            if self._keys[row] in hits:
                alike.setdefault(_form(hits[self._keys[row]], 0), []).append(row)
            else:
                misses.append(row)
        for form, members in alike.items():
            each = [hits[self._keys[row]] for row in members]
            answer = {name: np.stack([scores[name] for scores in each]) for name, *_ in form}
            self._spread(np.asarray(members, np.int64), len(members), answer)
        return np.asarray(misses, np.int64)

    def remember(self) -> None:
        """Keep the answers in the cache: all that are alike in form at once, which is faster."""
        kept, self.kept = self.kept, []
        alike: dict[Any, list[tuple[Int64, Answer]]] = {}
        for rows, answer in kept:
            alike.setdefault(_form(answer, 1), []).append((rows, answer))
        for form, members in alike.items():
            keys = [self._keys[row] for rows, _ in members for row in rows.tolist()]
            answers = {name: np.concatenate([one[name] for _, one in members]) for name, *_ in form}
            if self._cache is not None:
                self._cache.put(keys, answers)


def _form(answer: Answer, axis: int) -> tuple[Any, ...]:
    """Return the names, types and shapes of an answer, these from an axis on."""
    return tuple((name, t.dtype, t.shape[axis:]) for name, t in answer.items())


class Part:
    """The rows of a call that one version of a model scores, and the `call` that sends them.

    Parts of a call share what puts the answers together, and the lock that guards it.
    """

    def __init__(
        self,
        contract: Contract,
        inputs: Inputs,
        outputs: Mapping[str, Assembly],
        lock: threading.Lock,
        *,
        asked: Sequence[str],
        version: str | None,
        mask: bool,
        reuse: Reuse,
        pool: Pool,
    ) -> None:
        self._contract, self._pool = contract, pool
        self.caches = reuse.cache is not None
        keys: dict[int, bytes] = {}
        if reuse.deduplicate or reuse.cache is not None:
            # Without a checksum, the same name may be another model elsewhere.
            which = contract.digest or pool.settings.servers
            keys = keys_of(inputs, repr((contract.model, contract.version, which, asked)))
        self._sink = Sink(outputs, lock, keys, reuse.cache)
        duplicates, sent, different = self._sink.duplicates, inputs, len(inputs)
        if duplicates is not None:
            different = len(duplicates.sent)
            sent = inputs.only(self._sink.recall(duplicates.sent))
        self.call = Call(
            contract,
            sent,
            {"": self._sink},
            asked,
            version=version,
            mask=mask,
            lost_with=None if duplicates is None else duplicates.members,
        )
        statistics = self.call.statistics
        statistics.objects = len(inputs)
        statistics.deduplicated = len(inputs) - different
        statistics.cache_hits = different - len(sent)
        if statistics.cache_hits:
            self.call.served_versions.add(contract.version)
        elements = sent.count_elements()
        statistics.elements, statistics.truncated, statistics.padding = elements

    @property
    def keeps(self) -> bool:
        """Whether there are scores to be kept."""
        return bool(self._sink.kept)

    def keep(self) -> None:
        """Keep what has come so far, if it surely is of the version that it is kept for."""
        contract, call = self._contract, self.call
        if not self.keeps:
            return
        # Not what a fallback gave: another processor rounds otherwise.
        servers = {server for (server, _, _), _ in call.statistics}
        if not servers <= set(self._pool.settings.servers):
            return
        with contextlib.suppress(SonicError):
            now = self._pool.contract(contract.model, call.version, anew=True)
            same = (now.version, now.digest) == (contract.version, contract.digest)
            if same and call.served_versions == {contract.version}:
                self._sink.remember()
