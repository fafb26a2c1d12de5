"""The rows of a call for one version of a model, without rows that need not be sent."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import DeadlineError, ResponseError, SonicError
from sonic_coffea.pool import Call, Deadline
from sonic_coffea.reuse._deduplication import Duplicates, check_unchanged, keys_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from sonic_coffea.layouts import Inputs, Int64, Outputs
    from sonic_coffea.pool import Pool
    from sonic_coffea.reuse._cache import ScoreCache
    from sonic_coffea.transport import Contract

    Answer = Mapping[str, NDArray[Any]]

logger = logging.getLogger(__name__)

# After a call longer than 30 s, servers are asked once more for their file's digest, for up to 1 s.
_LONG_S, _ASKED_WITHIN_S = 30.0, 1.0


class Part:
    """The rows of a call that one version of a model scores, and the `call` that sends them.

    Answers go to all equal rows, in each output, and to the cache. Parts of a call share its
    outputs.

    Parameters
    ----------
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

    def __init__(
        self,
        contract: Contract,
        inputs: Inputs,
        outputs: Outputs,
        *,
        version: str | None,
        mask: bool,
        deduplicate: bool,
        cache: ScoreCache | None,
        pool: Pool,
        deadline: Deadline,
    ) -> None:
        self.cache = cache
        self._contract, self._pool = contract, pool
        self._begun_at = time.monotonic()
        self._outputs = outputs
        # By form: `keep` writes all answers of a form at once, which is faster.
        self._kept: dict[Any, list[tuple[Int64, Answer]]] = {}
        self._keeping = threading.Lock()
        self._duplicates: Duplicates | None = None
        sent, different, lost_with = inputs, len(inputs), None
        if deduplicate or cache is not None:
            # Without a checksum, the same name may be another model elsewhere.
            which = contract.digest or pool.settings.servers
            what = (contract.model, contract.version, which, outputs.tensors)
            scope = repr((*what, *contract.scored_by))
            keys = keys_of(inputs, scope)
            duplicates = self._duplicates = Duplicates(keys)
            self._keys, lost_with = keys, lambda rows: duplicates.expand(rows)[0]
            different = len(duplicates.sent)
            misses = duplicates.sent
            if cache is not None:
                misses = self._recall(cache, duplicates.sent, deadline)
                verify = partial(check_unchanged, keys, scope, inputs.without_axis)
                inputs = replace(inputs, verify=verify)
            sent = inputs.only(misses)
        self.call = Call(
            contract,
            sent,
            {"": self},
            outputs.tensors,
            version=version,
            mask=mask,
            lost_with=lost_with,
        )
        statistics = self.call.statistics
        statistics.objects = len(inputs)
        statistics.deduplicated = len(inputs) - different
        statistics.cache_hits = different - len(sent)
        if statistics.cache_hits:
            self.call.served_versions.add(contract.version)
            self.call.pin.answered(contract.version)
        elements = sent.count_elements()
        statistics.elements, statistics.truncated, statistics.padding = elements

    def place(self, selection: Any, rows: int, answer: Answer) -> None:
        """Put the answer for some rows in its places."""
        answer = self._outputs.of_rows(answer)
        self._spread(selection, rows, answer)
        if self.cache is not None:
            # A copy, as the answer may lie in memory that is used again.
            copied = {name: np.array(tensor) for name, tensor in answer.items()}
            with self._keeping:
                self._kept.setdefault(_form(answer, 1), []).append((selection, copied))

    def _spread(self, selection: Any, rows: int, answer: Answer) -> None:
        # The outputs refuse an answer of another length.
        if self._duplicates is not None and all(t.ndim and len(t) == rows for t in answer.values()):
            members, places = self._duplicates.expand(selection)
            if len(members) > rows:
                selection, rows = members, len(members)
                answer = {name: tensor[places] for name, tensor in answer.items()}
        self._outputs.place(selection, rows, answer)

    def _recall(self, cache: ScoreCache, rows: Int64, deadline: Deadline) -> Int64:
        """Place the scores of cache hits, and return the misses."""
        keys = [self._keys[row] for row in rows.tolist()]
        reading = deadline.run(lambda: cache.get(keys), name="sonic-cache")
        if not reading.done():
            raise DeadlineError(
                f"the cache {cache.path} was not read within {deadline.timeout_s:g} s",
                model=self._contract.model,
            )
        hits = reading.result()
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
            try:
                self._spread(np.asarray(members, np.int64), len(members), answer)
            except ResponseError as error:  # another declaration took them; servers have to answer
                logger.info("scores in %s do not fit the declaration: %s", cache.path, error)
                misses += members
        return np.asarray(sorted(misses), np.int64)

    def digests(self) -> set[str]:
        """Return the model's checksums by the servers, before and after the call."""
        contract, version = self._contract, self.call.version
        if not contract.digest:
            return set()
        last = self._pool.last_contract(contract.model, version)
        if time.monotonic() - self._begun_at > _LONG_S:
            with contextlib.suppress(SonicError):
                deadline = Deadline.after(_ASKED_WITHIN_S)
                last = self._pool.contract(contract.model, version, deadline=deadline)
        if last is None or last.version != contract.version or not last.digest:
            return {contract.digest}
        return {contract.digest, last.digest}

    @property
    def keeps(self) -> bool:
        """Whether there are scores to be kept."""
        return bool(self._kept)

    def keep(self) -> None:
        """Keep the scores so far, if they surely are of the version that they are kept for.

        A warning says if that cannot be known.
        """
        contract, call = self._contract, self.call
        if self.cache is None or not self._kept:
            return
        # Not scores of a fallback: another processor rounds differently.
        servers = {server for (server, _, _), _ in call.statistics}
        if not servers <= set(self._pool.settings.servers):
            return
        try:
            now = self._pool.contract(contract.model, call.version, anew=True)
            same = (now.version, now.digest) == (contract.version, contract.digest)
            if not same or call.served_versions != {contract.version}:
                return
            with self._keeping:
                kept, self._kept = self._kept, {}
            for form, members in kept.items():
                keys = [self._keys[row] for rows, _ in members for row in rows.tolist()]
                answers = {
                    n: np.concatenate([scores[n] for _, scores in members]) for n, *_ in form
                }
                self.cache.put(keys, answers)
        except SonicError as error:
            logger.warning("scores are not kept in %s: %s", self.cache.path, error)


def _form(answer: Answer, axis: int) -> tuple[Any, ...]:
    """Return the names, types and shapes of an answer, these from an axis on."""
    return tuple((name, t.dtype, t.shape[axis:]) for name, t in answer.items())
