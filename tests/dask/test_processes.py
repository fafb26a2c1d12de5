from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, default_client

from sonic_coffea.dask import _cluster

if TYPE_CHECKING:
    from collections.abc import Callable


class Part:
    """Stands for the processes, or for their client."""

    closed = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        Part.closed += 1

    def as_current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.mark.parametrize("when", ["__init__", "__exit__"])
def test_ctrl_c_waits_until_the_processes_have_started_or_ended(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed(Part):
        """Whose start, or end, Ctrl-C finds under way."""

    original: Callable[..., None] = getattr(Part, when)

    def press(self: Part, *arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        original(self, *arguments, **options)

    setattr(Pressed, when, press)
    monkeypatch.setattr(Part, "closed", 0)
    monkeypatch.setattr(_cluster, "LocalCluster", Pressed)
    monkeypatch.setattr(_cluster, "Client", Part)
    before = signal.getsignal(signal.SIGINT)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(KeyboardInterrupt), _cluster.cluster(1):
        assert when == "__exit__"
    assert Part.closed == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.server  # a cluster of processes
def test_its_client_is_the_current_one(one_worker: Client) -> None:
    """coffea's progress bar would wait for ever for the tasks of another cluster."""
    with one_worker.as_current(), _cluster.cluster(1) as client:
        assert default_client() is client
    with one_worker.as_current():
        assert default_client() is one_worker
