"""Pending calls, and placeholders for scores that are computed later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea._version import __version__
from sonic_coffea.errors import DeadlineError, SonicError, printable
from sonic_coffea.model._cases import chosen, mean
from sonic_coffea.pool import Deadline
from sonic_coffea.provenance import attributes, join_digests
from sonic_coffea.reporting import Statistics, tables

if TYPE_CHECKING:
    import awkward as ak
    from awkward.contents import Content
    from rich.console import RenderableType

    from sonic_coffea.layouts import Int64, Outputs, Structure
    from sonic_coffea.model._declaration import Declaration
    from sonic_coffea.reuse import Part

# Longest time in which scores are kept after Ctrl-C, for the same call to find them.
_KEPT_WITHIN_S = 1.0


class Pending:
    """A call whose scores are on their way.

    Attributes
    ----------
    rows : Structure
        The rows, and the structure above them.
    parts : list of Part
        The rows that each version of the model scores.
    lengths : mapping or None
        The number of events of each variation, if variations travel together.
    unsent : Statistics
        Statistics of rows that were given up before they were sent.
    give_back : callable, or mapping
        What makes plain arrays of the scores of plain arrays; of variations, one for each.
    """

    lengths: Mapping[str, int] | None = None
    unsent = Statistics()
    give_back: Any = None

    def __init__(self, model: Declaration, rows: Structure, outputs: Outputs) -> None:
        self._model = model.name
        # The model may be changed before the scores are there.
        self._version, self._config_hash = model.version, model.config_hash
        self.rows = rows
        self._outputs = outputs
        self._lost: list[Any] = []
        self.parts: list[Part] = []

    def __repr__(self) -> str:
        varied = f" under {', '.join(self.lengths)}" if self.lengths else ""
        return f"<Pending {printable(self._model)}{varied}: {len(self.rows)} rows, {self._state}>"

    def _repr_html_(self) -> str:
        s, total = self.statistics, self.statistics.total()
        rows = [
            ("rows", f"{len(self.rows):,}"),
            ("scored", f"{s.scored:,}, {s.scored / max(s.objects, 1):.0%}"),
            ("state", self._state),
            ("requests", f"{total.requests:,}, {total.retries:,} sent again"),
        ]
        failed = [part.call.failure for part in self.parts if part.call.failure is not None]
        notes = [] if self.done() else ["result() waits for it, cancel() ends it"]
        notes += [f"failed: {error}" for error in failed[:1]]
        return tables.table(f"Pending {self._model}", rows, notes=notes)

    @property
    def statistics(self) -> Statistics:
        """Statistics of the call's requests so far."""
        total = Statistics() + self.unsent
        for part in self.parts:
            total += part.call.statistics
        return total

    @property
    def _state(self) -> str:
        if not self.done():
            return "on its way"
        return "failed" if any(part.call.failure for part in self.parts) else "done"

    def lose(self, selection: Any, rows: int) -> None:
        """Give up rows before they are sent."""
        self._lost.append(selection)
        self.unsent = self.unsent + Statistics(objects=rows, masked=rows)

    def done(self) -> bool:
        """Return whether `result` would return, or raise, without waiting."""
        return all(part.call.over for part in self.parts)

    def cancel(self) -> None:
        """Cancel all requests without a response, here and on the servers."""
        for part in self.parts:
            part.call.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for `result` in an event loop, which goes on meanwhile; cancelled, it cancels."""
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        loop = asyncio.get_running_loop()

        def end(over: asyncio.Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(over.set)

        try:
            for part in self.parts:
                over = asyncio.Event()
                part.call.on_end(partial(end, over))
                await over.wait()
            # On a thread, as scores are put together, and may be kept in a cache.
            return await loop.run_in_executor(None, self.result)
        except asyncio.CancelledError:
            self.cancel()
            raise

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
        scores = self.scores_by(deadline, progress=progress)
        if self.lengths is None:
            return self.give_back(scores)
        stops = zip(self.lengths.items(), accumulate(self.lengths.values()), strict=True)
        return {
            name: self.give_back[name](scores[stop - length : stop])
            for (name, length), stop in stops
        }

    def scores_by(self, deadline: Deadline, *, progress: bool) -> ak.Array:
        """Return the scores of all variations, one variation after another."""
        content = self.content_by(deadline, progress=progress)
        return self.rows.unflatten(content, attrs=self._attributes())

    def content_by(self, deadline: Deadline, *, progress: bool) -> Content:
        """Return the score of each row."""
        try:
            with self._shown_progress(show=progress):
                for part in self.parts:
                    if not part.call.wait(deadline.left_s):
                        rows = len(self.rows)
                        late = DeadlineError(
                            f"not all of {rows} rows were scored within {deadline.timeout_s:g} s",
                            model=self._model,
                            events=self.rows.events_of(0, rows),
                        )
                        part.call.abandon(late)
                    part.call.raise_failure()
                    if not part.is_settled:
                        _settle([part], deadline)
        except BaseException as error:
            self.cancel()
            interrupted = isinstance(error, KeyboardInterrupt)
            within = Deadline.after(_KEPT_WITHIN_S if interrupted else 0.0)
            if keeping := [part for part in self.parts if part.keeps]:
                with contextlib.suppress(SonicError):
                    _settle(keeping, within)
            if interrupted and hasattr(error, "add_note"):  # Python 3.11
                remark = "a cache would keep them"
                if any(part.cache is not None for part in self.parts):
                    remark = "what is in the cache is not sent again"
                error.add_note(
                    f"{self.statistics.scored:,} of {len(self.rows):,} rows of {self._model} "
                    f"were scored; {remark}"
                )
            raise
        lost = [*self._lost, *(rows for part in self.parts for rows in part.call.lost)]
        return self.rows.without(self._outputs.content(), lost)

    def _attributes(self) -> dict[str, Any]:
        return attributes(self.provenance())

    def provenance(self) -> dict[str, Any]:
        """Return the provenance of the scores: model, version, servers, the declaration's hash."""
        calls = [part.call for part in self.parts]
        served = set().union(*(call.served_versions for call in calls))
        tallies = [entry for call in calls for entry in call.statistics]
        return {
            "model": self._model,
            "version": self._version or ", ".join(sorted(served)) or None,
            "digest": join_digests(part.digest for part in self.parts),
            "servers": sorted({server for (server, _, _), tally in tallies if tally.rows}),
            "config_hash": self._config_hash,
            "sonic_coffea": __version__,
        }

    @contextlib.contextmanager
    def _shown_progress(self, *, show: bool) -> Iterator[None]:
        """Show how many rows are scored, while the block runs."""
        if not show:
            yield
            return
        from rich import get_console, progress

        pending = self

        class Bar(progress.Progress):
            def get_renderables(self) -> Iterator[RenderableType]:
                for task in self.task_ids:
                    self.update(task, completed=pending.statistics.scored)
                yield from super().get_renderables()

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            "{task.completed:,.0f} of {task.total:,.0f} rows",
            progress.TimeElapsedColumn(),
            "<",
            progress.TimeRemainingColumn(),
        )
        console = get_console()
        # In a notebook, a bar that goes away would leave a gap below its cell.
        transient = not console.is_jupyter
        with Bar(*columns, console=console, transient=transient, refresh_per_second=5) as bar:
            bar.add_task(printable(self._model), total=len(self.rows))
            yield


def _settle(parts: Sequence[Part], deadline: Deadline) -> None:
    """Settle which file made scores, and keep them; servers are waited for until the deadline."""

    def settle() -> None:
        for part in parts:
            part.settle()

    settling = deadline.run(settle, name="sonic-cache")
    if settling.done():
        settling.result()


class Combined(Pending):
    """A call of several models: each object has the scores of its model, or the mean of all.

    Parameters
    ----------
    name : str
        The names of the models.
    sent : sequence of Pending
        The call of each model.
    numbers : array of int64 or None
        The number of the model of each row, -1 for none; None if all rows are scored.
    options : mapping
        Options of `chosen`.
    is_mean : bool
        Whether scores are the mean of all models; a row then has the number 0.
    """

    def __init__(
        self,
        name: str,
        sent: Sequence[Pending],
        numbers: Int64 | None,
        options: Mapping[str, Any],
        *,
        is_mean: bool,
    ) -> None:
        self._model, self._sent = name, sent
        self._numbers, self._options, self._is_mean = numbers, options, is_mean
        for pending in sent[1:]:
            names = f"model {sent[0]._model!r}", f"model {pending._model!r}"  # noqa: SLF001
            sent[0].rows.check_same(pending.rows, names)
        self.parts = [part for pending in sent for part in pending.parts]
        self.rows = sent[0].rows
        self.unsent = sum((pending.unsent for pending in sent), Statistics())

    def content_by(self, deadline: Deadline, *, progress: bool) -> Content:
        used, numbers = list(range(len(self._sent))), self._numbers
        if numbers is not None and not self._is_mean:
            # The other models do not know the shape of outputs that declare none.
            used = np.flatnonzero(np.bincount(numbers[numbers >= 0])).tolist() or [0]
        try:
            each = {n: self._sent[n].content_by(deadline, progress=progress) for n in used}
        except BaseException:
            self.cancel()
            raise
        if self._is_mean and len(each) > 1:
            each = {0: mean(list(each.values()))}
        return each[0] if numbers is None else chosen(numbers, each, **self._options)

    def provenance(self) -> dict[str, Any]:
        """Return the provenance of the scores: of each model, side by side."""
        each = [pending.provenance() for pending in self._sent]

        def joined(key: str) -> str | None:
            return ", ".join(record[key] for record in each if record[key] is not None) or None

        return {
            **each[0],
            "model": self._model,
            **{key: joined(key) for key in ("version", "config_hash")},
            "digest": join_digests(record["digest"] for record in each),
            "servers": sorted({server for record in each for server in record["servers"]}),
        }

    def _attributes(self) -> dict[str, Any]:
        """Return the provenance of all, and by its hash that of each model that scored rows."""
        scoring = [pending for pending in self._sent if pending.parts] or self._sent
        return attributes(self.provenance(), [pending.provenance() for pending in scoring])


class Deferred(Pending):
    """A placeholder of scores that are computed later, or never: a lazy array, or a typetracer."""

    def __init__(self, model: str, scores: Any) -> None:
        self._model = model
        self._scores = scores
        self.parts = []

    def __repr__(self) -> str:
        return f"<Deferred {printable(self._model)}: {self._scores!r}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def result_by(self, deadline: Deadline, *, progress: bool = False) -> Any:
        """Return the array without data; nothing is waited for."""
        del deadline, progress
        return self._scores
