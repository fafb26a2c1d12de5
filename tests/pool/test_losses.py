"""Rows that a server loses are tried elsewhere, are None if asked, or are one clear error."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.pool.scripted import (
    LOST,
    MODEL,
    ScriptedServer,
    doubled,
    inferred,
    objects,
    pool_of,
    refuses,
)
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sonic_coffea.transport import Contract


def test_one_server_that_is_gone_is_one_clear_error(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = lambda x: LOST if x[0, 0] >= 100 else 2 * x
    with pool_of("grpc://s1:8001", retry_timeout_s=0.5) as pool:
        events = ak.unflatten(objects(200), [2] * 100)
        with pytest.raises(errors.ServerLostError) as caught:
            MODEL(events, pool=pool)
        error = caught.value
        assert error.server == "grpc://s1:8001"
        assert error.model == "m"
        assert error.rows is not None
        assert error.rows[0] >= 100
        assert error.events == (error.rows[0] // 2, error.rows[1] // 2)
        # Who runs the chunk again hears it at once, after one more try.
        one.behaviour = lambda _: LOST
        before = len(one.requests)
        with pytest.raises(errors.ServerLostError):
            MODEL(events, pool=pool)
        assert len(one.requests) - before <= pool.settings.max_in_flight


def test_rows_are_placed_once_though_the_whole_is_answered_after_its_halves(
    servers: dict[str, ScriptedServer],
) -> None:
    """If rows counted twice, the call would end without the rows that are still on their way."""
    (one, _) = servers.values()
    late, last = threading.Event(), threading.Event()
    whole: list[int] = []

    def behave(x: np.ndarray) -> Any:
        if 8 in x:
            last.wait(60)
        elif 0 in x and len(x) == 4:
            whole.append(0)
            if len(whole) > 1:
                return errors.RouteTimeoutError("upstream request timeout")
            late.wait(60)
        return inferred(x)

    one.behaviour = behave
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(12), pool=pool)
        until(lambda: pending.statistics.scored == 8)
        late.set()
        until(lambda: not [x for x in one.answering if 0 in x])
        last.set()
        assert doubled(pending.result(timeout_s=30)) == list(range(12))
        assert pending.statistics.total().rows == 12


def test_lost_rows_are_none_if_asked(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = refuses(5, 18)
    array = ak.unflatten(objects(20), [3, 0, 10, 7])
    array = ak.mask(array, array.pt != 2)
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(array, pool=pool, on_error="mask")
        scores = pending.result()
        # Nineteen rows in requests of four: the None is not sent.
        flat = ak.flatten(scores.v0)
        assert flat.tolist() == [
            None if n == 2 or 5 <= n <= 8 or n >= 17 else 2.0 * n for n in range(20)
        ]
        assert ak.num(scores).tolist() == [3, 0, 10, 7]
        assert pending.statistics.masked == 7
        until(lambda: pool.statistics.masked == 7)
        with pytest.raises(errors.RequestError, match="rows 4..7"):
            MODEL(array, pool=pool)


def test_lost_rows_of_several_outputs(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.outputs = ("y", "z")
    one.behaviour = lambda x: refuses(5)(x) if 5 in x else {"y": 2 * x, "z": 3 * x}
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["v0"], "z": None})
    with pool_of("grpc://s1:8001") as pool:
        scores = model(objects(8), pool=pool, on_error="mask")
    assert scores.tolist() == [
        {"y": {"v0": 2.0 * n}, "z": 3.0 * n} if n < 4 else None for n in range(8)
    ]


def test_without_any_server_all_is_none(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()

    def metadata(model: str, version: str | None) -> Contract:
        raise LOST

    one.metadata = metadata  # type: ignore[method-assign]
    with pool_of("grpc://s1:8001", retry_timeout_s=0.1) as pool:
        pending = MODEL.submit(objects(8), pool=pool, on_error="mask")
        assert pending.result().tolist() == [None] * 8
        assert str(pending.result().type) == "8 * ?{v0: float32}"
        assert pending.statistics.masked == 8
        hint = r"\(sonic-coffea check grpc://s1:8001 m tries it step by step\)"
        with pytest.raises(errors.ServerLostError, match=hint) as caught:
            MODEL(ak.unflatten(objects(8), [2, 0, 6]), pool=pool)
        assert caught.value.model == "m"
        assert caught.value.events == (0, 3)


def test_wrong_rows_are_not_masked(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    array = ak.zip({"pt": np.array([1, np.nan], np.float32)})
    with pool_of("grpc://s1:8001") as pool:
        with pytest.raises(errors.InputError, match="NaN"):
            MODEL(array, pool=pool, on_error="mask")
        with pytest.raises(errors.ConfigError, match="did you mean 'mask'"):
            MODEL(array, pool=pool, on_error="masked")
        one.behaviour = lambda _: errors.AccessError("no")
        with pytest.raises(errors.AccessError):
            MODEL(objects(3), pool=pool, on_error="mask")
        one.lacks = True
        with pytest.raises(errors.ModelNotFoundError):
            sonic.Model("other", MODEL.inputs, MODEL.outputs)(
                objects(3), pool=pool, on_error="mask"
            )


@pytest.fixture(scope="module")
def small_batches(tagger_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "repository"
    sonic.build_repository(path, {"tagger": tagger_path}, max_batch_size=4)
    return path


# On a busy machine, a server must end when it is killed, not as its model's process stood still.
PATIENT = {"SONIC_COFFEA_STALL_S": "30"}


@pytest.fixture
def doomed(small_batches: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(
        small_batches, stop_timeout_s=1.0, restart=False, env=PATIENT
    ) as running:
        yield running


ANSWERS = 20


def test_processors_go_on_with_none_for_lost_rows(
    doomed: sonic.LocalServer, tagger: sonic.Model, jets: ak.Array
) -> None:
    pid = doomed.pid
    assert pid is not None

    class Masking(sonic.SonicProcessor):
        models = {"top": tagger}  # noqa: RUF012
        on_error = "mask"

        def acquire(self, events: Any) -> dict[str, Any]:
            return {"top": events}

        def overlap(self, events: Any) -> None:
            """Kill the server while it surely has a request."""
            until(lambda: pool.statistics.total().requests >= ANSWERS)
            os.kill(pid, signal.SIGSTOP)
            until(lambda: pool.servers[0].in_flight > 0)
            os.kill(pid, signal.SIGKILL)

        def produce(self, events: Any, scores: Any) -> dict[str, Any]:
            return {"scores": scores["top"]}

    # Hundreds of requests one after the other leave time to kill.
    with sonic.connect(doomed, retry_timeout_s=0.5, max_in_flight=1) as pool:
        out = Masking().process(jets)
    scores = out["scores"].top
    assert ak.num(scores).tolist() == ak.num(jets).tolist()
    lost = ak.sum(ak.is_none(scores, axis=1)) - ak.sum(ak.is_none(jets, axis=1))
    statistics = sonic.report(out).statistics
    assert lost == statistics.masked > 0
    assert ak.count(scores) == statistics.total().rows >= 4 * ANSWERS
