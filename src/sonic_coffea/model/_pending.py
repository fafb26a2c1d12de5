"""Pending calls, and placeholders for scores that are computed later."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import awkward as ak
import numpy as np
from awkward.contents import Content, IndexedOptionArray, NumpyArray
from awkward.index import Index64

from sonic_coffea._version import __version__
from sonic_coffea.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    SonicError,
    brief,
    printable,
)
from sonic_coffea.layouts import Int64, Outputs, RowSelection, Structure, held
from sonic_coffea.model._declaration import Declaration
from sonic_coffea.pool import Deadline
from sonic_coffea.provenance import attributes, join_digests
from sonic_coffea.reporting import Statistics
from sonic_coffea.reuse import Part

# Longest time in which scores are kept after Ctrl-C, for the same call to find them.
_KEPT_WITHIN_S = 1.0


class Pending:
    """A call whose scores are on their way.

    Parameters
    ----------
    models : sequence of Declaration
        The models.
    rows : Structure, optional
        The rows, and the structure above them.
    outputs : sequence of Outputs
        What puts the outputs of each model together; models may share it.
    numbers : array of int64, optional
        The number of each row's model, and -1 for none. By default, all models score all rows.
    is_mean : bool
        Whether the scores are the mean of all models; a row that has it then has the number 0.
    is_optional : bool
        Whether there may be None, by the types of the options.
    default : float, optional
        The score of rows without a model.
    ready : array, optional
        A placeholder of scores that are computed later, or never: a lazy array, or a typetracer.

    Attributes
    ----------
    parts : list of Part
        The rows that each version of a model scores.
    lengths : mapping or None
        The number of events of each variation, if variations travel together.
    lost, unsent : list of RowSelection, Statistics
        Rows that were given up before they were sent, and their statistics.
    give_back : callable, or mapping
        What makes plain arrays of the scores of plain arrays; of variations, one for each.
    """

    lengths: Mapping[str, int] | None = None
    give_back: Any = None

    def __init__(
        self,
        models: Sequence[Declaration],
        rows: Structure | None = None,
        outputs: Sequence[Outputs] = (),
        numbers: Int64 | None = None,
        *,
        is_mean: bool = True,
        is_optional: bool = False,
        default: float | None = None,
        ready: Any = None,
    ) -> None:
        # The models may be changed before the scores are there.
        self._models = [(model.name, model.version, model.config_hash) for model in models]
        self._name = ", ".join(name for name, _, _ in self._models)
        self.rows = Structure(np.zeros(2, np.int64)) if rows is None else rows
        self._numbers = np.zeros(len(self.rows), np.int64) if numbers is None else numbers
        self._outputs, self._is_mean = outputs, is_mean
        self._is_optional, self._default, self._ready = is_optional, default, ready
        self._content: Content | None = None
        self.lost: list[RowSelection] = []
        self.unsent = Statistics()
        self.parts: list[Part] = []

    def __repr__(self) -> str:
        varied = f" under {', '.join(map(str, self.lengths))}" if self.lengths else ""
        state = f"{len(self.rows)} rows, {'done' if self.done() else 'on its way'}"
        state = state if self._ready is None else f"later, as {self._ready!r}"
        return f"<Pending {printable(self._name)}{varied}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "scores that are on their way arrive in this process alone, so the call cannot be "
            "pickled, as for a result of a dask task; send what its result() returns"
        )

    @property
    def statistics(self) -> Statistics:
        """Statistics of the call's requests so far."""
        total = Statistics() + self.unsent
        for part in self.parts:
            total += part.call.statistics
            if part.digest is not None:
                contract = part.call.contract
                total.digests.add((contract.model, contract.version, part.digest))
        return total

    def done(self) -> bool:
        """Return whether `result` would return, or raise, without waiting."""
        return all(part.call.over for part in self.parts)

    def cancel(self) -> None:
        """Cancel all requests without a response, here and on the servers."""
        for part in self.parts:
            part.call.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for `result` on a thread, while the event loop goes on; cancelled, it cancels."""
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        try:
            return await asyncio.to_thread(self.result)
        except asyncio.CancelledError:
            self.cancel()
            raise

    @brief
    def result(self, timeout_s: float | None = None, *, progress: bool = False) -> Any:
        """Return the scores, in the structure of the objects.

        Ctrl-C, also in a notebook, cancels the requests in flight. With a cache, scores until then
        are kept, and the same call sends only the rest.

        Parameters
        ----------
        timeout_s : float, optional
            Longest time to wait; after it, the requests in flight are cancelled.
        progress : bool
            Whether to show a progress bar of the scored rows.

        Raises
        ------
        ConfigError
            If `timeout_s` is no number of seconds, or is longer than a week; in a forked child, if
            the call began before the fork.
        DeadlineError
            If `timeout_s` has passed.
        ContractError
            If the model's file was replaced while rows were scored.
        SonicError
            If rows could not be scored; it names server, model, request and events.
        """
        return self.result_by(Deadline.after(timeout_s), progress=progress)

    def result_by(self, deadline: Deadline, *, progress: bool = False) -> Any:
        """Return the scores; the deadline may be that of a call that began before; see `result`."""
        if self._ready is not None:
            return self._ready
        self._wait(deadline, progress=progress)
        # In this order, as several threads may ask at the same time.
        outputs, content = self._outputs, self._content
        if content is None:
            content = self._content = self._joined(outputs)
            self._outputs = ()  # they refer to the chunk's rows
        everyone = range(len(self._models))
        scoring = sorted({part.number for part in self.parts}) or everyone
        made_by = [self.provenance([number]) for number in scoring]
        record = made_by[0] if len(everyone) == 1 else self.provenance()
        scores = self.rows.unflatten(content, attrs=attributes(record, made_by))
        if self.lengths is None:
            return self.give_back(scores)
        each = zip(self.lengths, ak.unflatten(scores, [*self.lengths.values()]), strict=True)
        return {name: self.give_back[name](varied) for name, varied in each}

    def _wait(self, deadline: Deadline, *, progress: bool) -> None:
        """Wait until all rows are scored, and settle which files made the scores."""
        try:
            with self._shown_progress() if progress else contextlib.nullcontext():
                for part in self.parts:
                    if not part.call.wait(deadline.left_s):
                        part.call.abandon(self._late(part, deadline))
                    part.call.raise_failure()
                _settle([part for part in self.parts if not part.is_settled], deadline)
        except BaseException as error:
            self.cancel()
            within_s = _KEPT_WITHIN_S if isinstance(error, KeyboardInterrupt) else 0.0
            with contextlib.suppress(SonicError):
                _settle([part for part in self.parts if part.keeps], Deadline.after(within_s))
            raise

    def _late(self, part: Part, deadline: Deadline) -> DeadlineError:
        rows = len(self.rows)
        return DeadlineError(
            f"not all of {rows} rows were scored within {deadline.timeout_s:g} s",
            model=part.call.contract.model,
            events=(self.rows.event_of(0), self.rows.event_of(rows - 1) + 1),
        )

    def _joined(self, outputs: Sequence[Outputs]) -> Content:
        """Return the score of each row: that of its model, or the mean of all.

        It is the default where there is no model, and None where it is lost.
        """
        used, numbers, default = outputs, self._numbers, self._default
        if not self._is_mean:
            # Models without rows do not know the shape of outputs that declare none.
            used = [o for n, o in enumerate(used) if np.any(numbers == n)] or used[:1]
        different = list(dict.fromkeys(used))
        each = [outputs.content() for outputs in different]
        if len(each) > 1:
            _check_types(each)
        if self._is_mean and len(each) > 1:
            each = [ak.transform(_mean, *each, highlevel=False)]
        places = [different.index(o) if o in different else -1 for o in outputs]
        numbers = np.asarray([*places, -1])[numbers]
        if default is not None:
            numbers[numbers < 0] = len(each)
            filled = partial(_filled, default=default)
            each = [*each, ak.transform(filled, each[0], highlevel=False)]
        for rows in (*self.lost, *(rows for part in self.parts for rows in part.call.lost)):
            numbers[rows] = -1
        is_optional = self._is_optional or bool(np.any(numbers < 0))
        if len(each) == 1 and not is_optional:
            return each[0]
        whole = ak.concatenate([ak.Array(content) for content in each]).layout
        index = np.where(numbers < 0, -1, numbers * len(numbers) + np.arange(len(numbers)))
        return IndexedOptionArray.simplified(Index64(index), whole) if is_optional else whole[index]

    def provenance(self, numbers: Collection[int] | None = None) -> dict[str, Any]:
        """Return the provenance of the scores: models, versions, servers, declarations' hashes.

        Parameters
        ----------
        numbers : collection of int, optional
            The models whose scores are meant, by their places; by default, all.
        """
        numbers = range(len(self._models)) if numbers is None else numbers
        # The digests are in the order of the models and versions.
        parts = sorted(
            (part for part in self.parts if part.number in numbers),
            key=lambda part: (part.number, *sorted(part.call.served_versions)),
        )
        names, versions, hashes = zip(*(self._models[number] for number in numbers), strict=True)
        served = {n: set[str]() for n in numbers}
        for part in parts:
            served[part.number] |= part.call.served_versions
        each = (v or ", ".join(sorted(served[n])) for n, v in zip(numbers, versions, strict=True))
        tallies = [entry for part in parts for entry in part.call.statistics]
        return {
            "model": ", ".join(names),
            "version": ", ".join(filter(None, each)) or None,
            "digest": join_digests(part.digest for part in parts),
            "servers": sorted({server for (server, _, _), tally in tallies if tally.rows}),
            "config_hash": ", ".join(hashes),
            "sonic_coffea": __version__,
        }

    @contextlib.contextmanager
    def _shown_progress(self) -> Iterator[None]:
        """Show a bar of the rows that are scored."""
        from rich import get_console
        from rich.errors import LiveError
        from rich.live import Live
        from rich.markup import escape
        from rich.progress import Progress

        bar = Progress()
        task = bar.add_task(escape(printable(self._name)), total=self.statistics.objects)

        def shown() -> Progress:
            bar.update(task, completed=self.statistics.scored)
            return bar

        # In a notebook, a bar that goes away would leave a gap below its cell.
        is_transient = not get_console().is_jupyter
        with contextlib.ExitStack() as stack:
            # Before rich 14.1, there is one display at a time, such as the bar of coffea.
            with contextlib.suppress(LiveError):
                stack.enter_context(Live(get_renderable=shown, transient=is_transient))
            yield


def _settle(parts: Sequence[Part], deadline: Deadline) -> None:
    """Settle which file made scores, and keep them; servers are waited for until the deadline."""

    def settle() -> None:
        for part in parts:
            part.settle()

    if parts and (settling := deadline.run(settle, name="sonic-cache")).done():
        settling.result()


def _check_types(each: Sequence[Content]) -> None:
    """Refuse scores of different types, of which awkward would take a number for each row's."""
    # Elements that were truncated make an option of any type.
    types = dict.fromkeys(re.sub(r"option\[|[]?]", "", str(content.form.type)) for content in each)
    if len(types) > 1:
        raise ContractError(f"the models give scores of different types: {' and '.join(types)}")


def _filled(content: Content, default: float, **_: Any) -> Content | None:
    """Return numbers that are all the default, for `ak.transform`."""
    if (content.is_list and not content.is_regular) or content.is_unknown:
        raise ConfigError(
            "default= is for scores of numbers, and not for lists or strings; without it, objects "
            "that mask= leaves out are None"
        )
    if not content.is_numpy:
        return None
    held(default, content.dtype, "the scores", "default")
    return NumpyArray(np.full_like(content.data, default))


def _mean(contents: Sequence[Content], **_: Any) -> tuple[Content] | None:
    """Return the mean of numbers, for `ak.transform`."""
    if not all(content.is_numpy for content in contents):
        return None
    numbers = [np.asarray(content.data) for content in contents]
    averaged = np.mean(numbers, axis=0, dtype=np.float64)
    return (NumpyArray(averaged.astype(numbers[0].dtype)),)
