"""The rows of a call for one version of a model, without rows that need not be sent."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ContractError, DeadlineError, ResponseError, SonicError
from sonic_coffea.pool import MAX_MISSES, QUIET_S, Call, Deadline
from sonic_coffea.reuse._deduplication import Duplicates, check_unchanged, keys_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.layouts import Inputs, Int64, Outputs
    from sonic_coffea.pool import Pool
    from sonic_coffea.reuse._cache import ScoreCache
    from sonic_coffea.transport import Contract

    Answer = Mapping[str, NDArray[Any]]

logger = logging.getLogger(__name__)

# How long servers may take to tell their digest again when a call ends; after it, it is unknown.
_ASKED_WITHIN_S = 3.0


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
        self._is_sure = False
        self._outputs = outputs
        self._kept: list[tuple[list[bytes], Answer]] = []
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
        self.call.on_end(self._ended)
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
            self._kept.append(([self._keys[row] for row in selection.tolist()], copied))

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
                alike.setdefault(_form(hits[self._keys[row]]), []).append(row)
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
        known, age_s = self._pool.last_contract(contract.model, call.version)
        same = known is not None and _file(known) == _file(contract)
        fresh = same and age_s <= QUIET_S and call.served_versions <= {contract.version}
        self._is_sure = fresh or not call.served_versions

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
        self._is_sure = True
        problem: Any = None
        if contract.digest and servers:
            times = MAX_MISSES if kept else 1
            outcomes = self._pool.digests(contract, servers, times, _ASKED_WITHIN_S)
            self._check_same(outcomes)
            others = [outcome for outcome in outcomes if outcome != contract.digest]
            self._is_sure = not others
            problem = (others[0] or "not all servers tell the digest any more") if others else None
        # Not scores of a fallback: another processor rounds differently.
        named = set(servers) <= set(self._pool.settings.servers)
        if kept and self.cache is not None and named:
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
                    within = Deadline.after(_ASKED_WITHIN_S)
                    self._pool.contract(
                        contract.model, self.call.version, anew=True, deadline=within
                    )
                raise ContractError(
                    f"the model's file had the digest {contract.digest} before rows were scored, "
                    f"and has {digest} now: it was replaced, or servers have different files, and "
                    "nobody knows which of them scored which rows; call again, and give each file "
                    "a version of its own",
                    model=contract.model,
                    version=contract.version,
                )


def _file(contract: Contract) -> tuple[str, str]:
    return contract.version, contract.digest


def _form(answer: Answer) -> tuple[Any, ...]:
    """Return the names, types and shapes of an answer."""
    return tuple((name, t.dtype, t.shape) for name, t in answer.items())
