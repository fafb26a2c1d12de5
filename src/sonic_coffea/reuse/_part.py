"""The rows of a call for one version of a model, without rows that need not be sent."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from sonic_coffea.errors import ContractError, DeadlineError, InputError, ResponseError, SonicError
from sonic_coffea.layouts import BLOCK_BYTES, Inputs, Int64, Outputs, ranges
from sonic_coffea.pool import MAX_MISSES, QUIET_S, Call, Deadline, Pool, is_in_process
from sonic_coffea.reuse._cache import ScoreCache
from sonic_coffea.transport import STRINGS, Contract, to_wire

logger = logging.getLogger(__name__)

# How long servers may take to name their digest; then it is unknown.
_ASKED_WITHIN_S = 3.0

Answer = Mapping[str, NDArray[Any]]


class EqualRows:
    """The rows of a call by what would be sent for them: of equal rows, the first is sent.

    A row's key is a hash of 128 bits. Two rows that differ have the same key with a probability of
    10^-38; among 10^9 rows, there is such a pair with a probability of 10^-21.

    Parameters
    ----------
    inputs : Inputs
        The rows.
    scope : str
        What else scores depend on, such as the model.

    Attributes
    ----------
    sent : array of int64
        The first of each set of equal rows.
    """

    def __init__(self, inputs: Inputs, scope: str) -> None:
        self._scope, self._without_axis = scope, inputs.without_axis
        self._keys = np.zeros((len(inputs.rows), 2), np.uint64)
        inputs = replace(inputs, without_axis=frozenset())  # many rows at a time
        for segment in inputs.segments:
            step = max(1, BLOCK_BYTES // int(np.max(segment.row_bytes, initial=1)))
            for start in range(segment.start, segment.stop, step):
                stop = min(start + step, segment.stop)
                keys = _keys_of_tensors(inputs.pack(start, stop), scope)
                self._keys[inputs.numbers(start, stop)] = keys
        # One set of equal rows after the other. Should different keys ever begin with the same 64
        # bits, a set may be in two places, and its row is sent twice.
        rows = inputs.numbers(0, len(inputs))
        self._members = rows[np.argsort(self._keys[rows, 0])]
        ordered, is_first = self._keys[self._members], np.ones(len(rows), np.bool_)
        is_first[1:] = np.logical_or(*(ordered[1:] != ordered[:-1]).T)
        self._begins = np.flatnonzero(is_first)
        self._sizes = np.diff(self._begins, append=len(rows))
        self._sets = np.zeros(len(inputs.rows), np.int64)
        self._sets[self._members] = np.cumsum(is_first) - 1
        self.sent = np.sort(np.minimum.reduceat(self._members, self._begins))

    def keys(self, rows: Int64) -> list[bytes]:
        """Return the keys of some rows."""
        return [key.tobytes() for key in self._keys[rows]]

    def expand(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return all rows that are equal to `rows`, and the index in `rows` of each one's equal."""
        sets = self._sets[rows]
        counts = self._sizes[sets]
        members = self._members[ranges(self._begins[sets], counts)]
        return members, np.repeat(np.arange(len(rows)), counts)

    def members(self, rows: Int64) -> Int64:
        """Return all rows that are equal to `rows`."""
        return self.expand(rows)[0]

    def verify(self, rows: Int64, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Raise if the tensors that are about to be sent are not those of the rows' keys.

        The arrays of a call are packed again for each request, long after the keys were made.
        """
        without = self._without_axis
        by_row = {name: t[np.newaxis] if name in without else t for name, t in tensors.items()}
        if not np.array_equal(_keys_of_tensors(by_row, self._scope), self._keys[rows]):
            raise InputError(
                "the arrays were changed after the call was submitted, so that its scores would be "
                "cached for other rows; leave them unchanged until the result is there, or submit "
                "a copy"
            )


def _keys_of_tensors(tensors: Mapping[str, NDArray[Any]], scope: str) -> NDArray[np.uint64]:
    """Return ``[n, 2]``: the hash of each row."""
    form = [(name, t.dtype.str, t.shape[1:]) for name, t in tensors.items()]
    head = np.frombuffer(xxhash.xxh3_128_digest(f"{scope} {form}".encode()), np.uint8)
    rows = len(next(iter(tensors.values())))
    parts = [np.broadcast_to(head, (rows, len(head)))]
    for tensor in tensors.values():
        whole = np.ascontiguousarray(_hashed(tensor))
        parts.append(whole.reshape(rows, -1).view(np.uint8))
    packed = np.ascontiguousarray(np.concatenate(parts, axis=1))
    digests = b"".join(map(xxhash.xxh3_128_digest, packed))
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def _hashed(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor with equally many bytes in each row: hashes in place of strings."""
    if tensor.dtype != STRINGS:
        return tensor
    rows = (tensor[i : i + 1] for i in range(len(tensor)))  # tensor[i] may be a string
    each = (xxhash.xxh3_128_digest(to_wire(row).tobytes()) for row in rows)
    return np.frombuffer(b"".join(each), np.uint8).reshape(len(tensor), -1)


class Part:
    """The rows of a call that one version of a model scores, and the `call` that sends them.

    Answers go to all equal rows, in each output, and to the cache. Parts of a call share its
    outputs.

    Parameters
    ----------
    number : int
        The number of the model among those of the call.
    deduplicate : bool
        Whether equal rows are sent once; with a cache, they are.
    cache : ScoreCache or None
        The cache that scores are read from, and kept in.
    deadline : Deadline
        How long the look-up may take.

    Raises
    ------
    DeadlineError
        If the look-up takes longer.
    """

    def __init__(  # noqa: PLR0913  independent options
        self,
        contract: Contract,
        inputs: Inputs,
        outputs: Outputs,
        *,
        number: int,
        version: str | None,
        mask: bool,
        deduplicate: bool,
        cache: ScoreCache | None,
        pool: Pool,
        deadline: Deadline,
    ) -> None:
        self.number, self.cache = number, cache
        self._contract, self._pool = contract, pool
        # Without a checksum, the same name may be another model elsewhere.
        self._which = contract.digest or pool.settings.servers
        self._is_sure = False
        self._outputs = outputs
        self._kept: list[tuple[list[bytes], Answer]] = []
        self._equal: EqualRows | None = None
        sent, different, lost_with = inputs, len(inputs), None
        if deduplicate or cache is not None:
            what = (contract.model, contract.version, self._which, outputs.tensors)
            equal = self._equal = EqualRows(inputs, repr((*what, *contract.scored_by)))
            misses, different, lost_with = equal.sent, len(equal.sent), equal.members
            if cache is not None:
                misses = self._recall(cache, equal, deadline)
                inputs = replace(inputs, verify=equal.verify)
            sent = inputs.only(misses)
        self.call = Call(
            contract,
            sent,
            self._place,
            outputs.tensors,
            version=version,
            mask=mask,
            lost_with=lost_with,
            ended=self._ended,
        )
        statistics = self.call.statistics
        statistics.objects = len(inputs)
        statistics.deduplicated = len(inputs) - different
        statistics.cache_hits = different - len(sent)
        if statistics.cache_hits:
            self.call.served_versions.add(contract.version)
        statistics.elements, statistics.truncated, statistics.padding = sent.count_elements()

    def _place(self, selection: Any, rows: int, answer: Answer) -> None:
        """Put the answer for some rows in its places, and keep it for the cache."""
        answer = self._outputs.of_rows(answer)
        self._spread(selection, rows, answer)
        if self.cache is not None and self._equal is not None:
            # A copy, as the answer may lie in memory that is used again.
            copied = {name: np.array(tensor) for name, tensor in answer.items()}
            self._kept.append((self._equal.keys(selection), copied))

    def _spread(self, selection: Any, rows: int, answer: Answer) -> None:
        # The outputs refuse an answer of another length.
        if self._equal is not None and all(t.ndim and len(t) == rows for t in answer.values()):
            members, places = self._equal.expand(selection)
            if len(members) > rows:
                selection, rows = members, len(members)
                answer = {name: tensor[places] for name, tensor in answer.items()}
        self._outputs.place(selection, rows, answer)

    def _recall(self, cache: ScoreCache, equal: EqualRows, deadline: Deadline) -> Int64:
        """Place the scores of cache hits, and return the misses."""
        rows = dict(zip(equal.keys(equal.sent), equal.sent.tolist(), strict=True))
        reading = deadline.run(lambda: cache.get(sorted(rows)), name="sonic-cache")
        if not reading.done():
            raise DeadlineError(
                f"the cache {cache.path} was not read within {deadline.timeout_s:g} s",
                model=self._contract.model,
            )
        hits: list[int] = []
        for keys, answer in reading.result():
            some = [rows[key] for key in keys]
            try:
                self._spread(np.asarray(some), len(some), answer)
            except ResponseError as error:  # another declaration took them; servers have to answer
                logger.info("scores in %s do not fit the declaration: %s", cache.path, error)
            else:
                hits += some
        return np.setdiff1d(equal.sent, np.asarray(hits, np.int64), assume_unique=True)

    @property
    def digest(self) -> str | None:
        """The digest of the file that has made the scores; None if nobody knows it for sure."""
        return (self._contract.digest or None) if self._is_sure else None

    @property
    def keeps(self) -> bool:
        """Whether there are scores to be kept."""
        return bool(self._kept)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to keep, and nothing more to be learned of the digest."""
        return not self._kept and (self._is_sure or not self._contract.digest)

    def _ended(self) -> None:
        """Note whether the digest can have changed since it was asked for."""
        contract, call = self._contract, self.call
        age_s, known = self._pool.last_contract(contract.model, call.version)
        expected = contract.version, contract.digest
        same = known is not None and (known.version, known.digest) == expected
        fresh = same and age_s <= QUIET_S and call.served_versions <= {contract.version}
        self._is_sure = fresh or not call.served_versions
        del self._outputs, self._equal  # they refer to the chunk's rows

    def settle(self) -> None:
        """Ask for the digest once more if it can have changed, and keep the scores if it has not.

        A warning says if scores cannot be kept.

        Raises
        ------
        ContractError
            If a server has another file by now: nobody knows which of them scored which rows.
        """
        contract, call = self._contract, self.call
        if not call.served_versions <= {contract.version}:
            return
        kept, self._kept = self._kept, []
        servers = sorted({server for (server, _, _), tally in call.statistics if tally.rows})
        problem: Any = None
        # What this process has loaded itself stays as it is.
        asked = [server for server in servers if not is_in_process(server)]
        if contract.digest:
            times = MAX_MISSES if kept else 1
            outcomes = self._pool.digests(contract, asked, times, _ASKED_WITHIN_S)
            self._check_same(outcomes)
            others = [outcome for outcome in outcomes if outcome != contract.digest]
            problem = (others[0] or "not all servers tell the digest any more") if others else None
        self._is_sure = problem is None
        # Not scores of a fallback: another processor rounds differently. Nor those of servers that
        # have replaced the ones of the keys.
        named = self._pool.settings.servers
        are_of_keys = set(servers) <= set(named) and self._which in (contract.digest, named)
        if kept and self.cache is not None and are_of_keys:
            try:
                if problem is None:
                    self.cache.put(kept)
            except SonicError as error:
                problem = error
            if problem is not None:
                logger.warning("scores are not kept in %s: %s", self.cache.path, problem)

    def _check_same(self, outcomes: Sequence[str | SonicError]) -> None:
        """Raise if a digest is another one than before; the next call asks for it anew."""
        contract = self._contract
        for digest in outcomes:
            if isinstance(digest, str) and digest not in ("", contract.digest):
                with contextlib.suppress(SonicError):
                    deadline = Deadline.after(_ASKED_WITHIN_S)
                    version = self.call.version
                    self._pool.contract(contract.model, version, anew=True, deadline=deadline)
                # Also when the scores are asked for again.
                self.call.failure = ContractError(
                    f"the model's file had the digest {contract.digest} before rows were scored, "
                    f"and has {digest} now: it was replaced, or servers have different files, so "
                    "that nobody knows which file scored which rows; call again, and give each "
                    "file a version of its own",
                    model=contract.model,
                    version=contract.version,
                )
                self.call.raise_failure()
