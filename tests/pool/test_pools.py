"""Which pool scores a call: of threads, `with` blocks, pickles, copies and forked children."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import dask
import pytest
from dask.base import tokenize
from tests.doubling import MODEL, Doubling, jets, multiplier
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeServer

JETS = jets(1.0, 2.0)


def factor(scores: Any) -> float:
    first, second = scores.twice.tolist()
    assert second == 2 * first
    return float(first)


@pytest.fixture
def one() -> Iterator[FakeServer]:
    with multiplier(2) as server:
        yield server


@pytest.fixture
def other() -> Iterator[FakeServer]:
    with multiplier(3) as server:
        yield server


@pytest.fixture
def four() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(multiplier(number)) for number in range(2, 6)]


class Times(Doubling):
    def overlap(self, events: Any) -> Any:
        return factor(MODEL(events))

    def produce(self, events: Any, scores: Any) -> Any:
        return factor(scores["m"]), scores.overlap, factor(MODEL(events))


def pickled(url: str, *objects: Any) -> bytes:
    with sonic.connect(url):
        return pickle.dumps(objects)


def test_asyncio_tasks_with_blocks_of_their_own_use_their_servers(four: list[FakeServer]) -> None:
    async def score(server: FakeServer) -> list[float]:
        found = []
        for _ in range(8):
            with sonic.connect(server.url):
                await asyncio.sleep(0)  # for the others
                found.append(factor(await MODEL.submit(JETS)))
        return found

    async def main() -> list[list[float]]:
        return await asyncio.gather(*map(score, four))

    assert asyncio.run(main()) == [[number] * 8 for number in range(2, 6)]


def test_event_loops_carry_no_block_into_other_threads(one: FakeServer, other: FakeServer) -> None:
    """A callback runs in the context that it was made in; dask starts tasks in callbacks."""
    with sonic.connect(one.url), ThreadPoolExecutor(1) as thread:
        context = contextvars.copy_context()
        plain = thread.submit(sonic.connect, other.url).result()
        assert factor(thread.submit(context.run, MODEL, JETS).result()) == 3
        assert factor(context.run(MODEL, JETS)) == 2
    assert factor(context.run(MODEL, JETS)) == 3
    assert not plain.closed


def test_a_block_leaves_other_threads_their_connection(one: FakeServer, other: FakeServer) -> None:
    connected, ask = threading.Event(), threading.Event()
    pool = sonic.connect(one.url)

    def score() -> float:
        sonic.connect(one.url)
        connected.set()
        assert ask.wait(60)
        return factor(MODEL(JETS))

    with ThreadPoolExecutor(1) as threads:
        of_other = threads.submit(score)
        assert connected.wait(60)
        with pool:
            pass
        sonic.connect(other.url)
        ask.set()
        assert of_other.result() == 2


def test_threads_stay_connected_to_the_servers_that_they_named_last(
    one: FakeServer, other: FakeServer
) -> None:
    def connect(*urls: str) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(lambda: [sonic.connect(url) for url in urls]).result()

    sonic.connect(one.url)
    sonic.connect(other.url)
    with sonic.connect(one.url):
        assert factor(MODEL(JETS)) == 2
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: factor(MODEL(JETS))).result() == 3
    assert factor(MODEL(JETS)) == 3
    connect(one.url)
    assert factor(MODEL(JETS)) == 3
    connect(*(f"grpc://127.0.0.1:{port}" for port in range(1, 9)))
    gc.collect()
    assert factor(MODEL(JETS)) == 3


def test_threads_are_not_taken_for_earlier_ones(one: FakeServer, other: FakeServer) -> None:
    """The system gives the number of a thread that has ended to another one."""

    def run(work: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(work).result()

    for _ in range(5):
        run(lambda: sonic.connect(one.url))
    sonic.connect(other.url)
    assert {run(lambda: factor(MODEL(JETS))) for _ in range(20)} == {3}


def test_a_block_goes_on_when_a_generator_ends_that_had_begun_one_before(
    four: list[FakeServer],
) -> None:
    def generator() -> Iterator[float]:
        with sonic.connect(four[0].url):
            yield factor(MODEL(JETS))

    sonic.connect(four[1].url)
    begun = generator()
    assert next(begun) == 2
    with sonic.connect(four[2].url):
        begun.close()
        assert factor(MODEL(JETS)) == 4
    assert factor(MODEL(JETS)) == 3


def test_the_innermost_block_counts_and_the_last_one_of_a_pool_closes_it(
    one: FakeServer, other: FakeServer
) -> None:
    sonic.connect(other.url)
    with sonic.connect(one.url) as outer:
        with sonic.connect(other.url), sonic.connect(one.url) as inner:
            assert inner is outer
            assert factor(MODEL(JETS)) == 2
        with sonic.connect(other.url), outer, sonic.connect(other.url):
            assert factor(MODEL(JETS)) == 3
        assert factor(MODEL(JETS)) == 2
        last = sonic.connect(other.url)  # for the rest of the block, or until it is closed
        assert factor(MODEL(JETS)) == 3
        last.close()
        assert factor(MODEL(JETS)) == 2
        sonic.connect(other.url)
    assert outer.closed
    assert factor(MODEL(JETS)) == 3


@pytest.mark.parametrize("pickled", [False, True])
def test_threads_do_not_guess_between_the_block_around_and_another_connection(
    one: FakeServer, other: FakeServer, pickled: bool
) -> None:
    """An executor's threads are not in the block in which it was made, and they pickle, too."""
    with sonic.connect(one.url) as pool:
        sent = pickle.dumps(pool)
    sonic.connect(other.url)
    block = pickle.loads(sent) if pickled else sonic.connect(one.url)
    with block, ThreadPoolExecutor(1) as thread:
        # Not as it pickles: dask's scheduler would hang.
        for model in (MODEL, pickle.loads(thread.submit(pickle.dumps, MODEL).result())):
            with pytest.raises(errors.ConfigError, match="in no .*is connected to"):
                thread.submit(model, JETS).result()
        assert factor(MODEL(JETS)) == 2
    assert factor(MODEL(JETS)) == 3


def test_threads_do_not_guess_between_the_connections_of_others(
    one: FakeServer, other: FakeServer
) -> None:
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for thread, server in ((first, one), (second, other)):
            thread.submit(sonic.connect, server.url).result()
        with pytest.raises(errors.ConfigError, match="in no .*is connected to"):
            MODEL(JETS)
        assert [factor(thread.submit(MODEL, JETS).result()) for thread in (first, second)] == [2, 3]
    assert factor(MODEL(JETS)) == 3  # the last one: no thread is left that means the other


def test_blocks_of_pickled_pools_do_not_replace_the_servers_of_the_configuration(
    one: FakeServer, other: FakeServer
) -> None:
    with sonic.connect(one.url) as pool:
        sent = pickle.dumps(pool)
    with (
        dask.config.set({"sonic.servers": [other.url]}),
        pickle.loads(sent),
        ThreadPoolExecutor(1) as thread,
    ):
        assert factor(thread.submit(MODEL, JETS).result()) == 3
        assert factor(MODEL(JETS)) == 2


def test_blocks_of_other_threads_do_not_count(one: FakeServer, other: FakeServer) -> None:
    sonic.connect(other.url)
    entered, asked = threading.Barrier(2), threading.Event()

    def stay() -> None:
        with sonic.connect(one.url):
            entered.wait(60)
            asked.wait(60)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(stay)
        entered.wait(60)
        found = factor(MODEL(JETS))
        asked.set()
    assert found == 3


@pytest.mark.parametrize("elsewhere", ["nothing", "plainly", "block"])
def test_pickles_are_scored_by_the_servers_of_their_sender(
    one: FakeServer, other: FakeServer, elsewhere: str
) -> None:
    folds = sonic.Folds([MODEL, MODEL], fold=None)
    sent = pickled(one.url, MODEL, folds, Times())
    with ExitStack() as stack:
        if elsewhere == "plainly":
            sonic.connect(other.url)
        elif elsewhere == "block":
            stack.enter_context(sonic.connect(other.url))
        model, sent_folds, processor = pickle.loads(sent)
        again = pickle.loads(pickle.dumps(model))
        assert factor(model(JETS)) == factor(again(JETS)) == factor(sent_folds(JETS)) == 2
        assert processor.process(JETS) == (2, 2, 2)
        if elsewhere != "nothing":
            assert factor(MODEL(JETS)) == Times().process(JETS)[0] == 3
            assert factor(model(JETS, pool=sonic.connect(other.url))) == 3


def test_pickles_of_many_settings_leave_few_threads(one: FakeServer) -> None:
    before = threading.active_count()
    for number in range(12):
        with sonic.connect(one.url, max_in_flight=number + 1):
            sent = pickle.dumps(MODEL)
        assert factor(pickle.loads(sent)(JETS)) == 2
    until(lambda: bool(gc.collect()) or threading.active_count() - before <= 16)


def test_scores_on_their_way_keep_their_pool(one: FakeServer, other: FakeServer) -> None:
    """Also when nobody refers to it, and many others have been opened since."""
    one.hold()
    (model,) = pickle.loads(pickled(one.url, MODEL))
    pending = model.submit(JETS)
    del model
    for number in range(8):
        (model,) = pickle.loads(pickled(f"grpc://127.0.0.{number + 1}:9", MODEL))
    (model,) = pickle.loads(pickled(other.url, MODEL))
    assert factor(model(JETS)) == 3
    gc.collect()
    one.release()
    assert factor(pending.result(60)) == 2


def test_pickles_with_other_tokens_have_pools_of_their_own() -> None:
    """Also of the same servers; where the secrets are known, both are scored."""
    headers = {"authorization": "Bearer right"}
    with multiplier(2, headers=headers) as one:
        sonic.connect(one.url, token="right")
        right = pickle.dumps(MODEL)
        sonic.connect(one.url, token="wrong", retry_timeout_s=0.1)
        assert factor(pickle.loads(right)(JETS)) == 2
        with pytest.raises(errors.SonicError):
            MODEL(JETS)


def test_pickles_follow_a_change_of_servers(one: FakeServer, other: FakeServer) -> None:
    with sonic.connect(one.url) as pool:
        assert factor(MODEL(JETS)) == 2
        pool.set_servers(other.url)
        model = pickle.loads(pickle.dumps(MODEL))
        assert model.pool_of_pickle is pool
        sent = pickle.dumps(MODEL)
    assert factor(pickle.loads(sent)(JETS)) == 3


def test_copies_are_no_pickles(one: FakeServer, other: FakeServer) -> None:
    with sonic.connect(one.url):
        copies = copy.copy(MODEL), copy.deepcopy(MODEL)
        sent = pickle.loads(pickle.dumps(MODEL))
    with sonic.connect(other.url):
        assert [factor(model(JETS)) for model in copies] == [3, 3]
        assert factor(copy.deepcopy(sent)(JETS)) == 2


def test_calls_leave_the_keys_of_tasks_as_they_are(one: FakeServer, other: FakeServer) -> None:
    """dask would compute what it has computed for the same model."""
    with sonic.connect(one.url):
        model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})
        key = tokenize(model)
        assert factor(model(JETS)) == 2
        sent = pickle.loads(pickle.dumps(model))
        assert tokenize(model) == tokenize(sent) == key
    with sonic.connect(other.url):
        assert tokenize(model) != key
        again = pickle.loads(pickle.dumps(sent))
    with sonic.connect(one.url):
        assert tokenize(again) == key


def test_deep_copies_refer_to_themselves() -> None:
    class Analysis(sonic.SonicProcessor):
        def __init__(self) -> None:
            self.cut, self.threshold = self.produce, 0.5

        def produce(self, events: Any, scores: Any) -> Any:
            return self.threshold

    copied = copy.deepcopy(Analysis())
    copied.threshold = 0.9
    assert copied.cut(None, None) == 0.9


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_children_use_a_pool_and_cannot_wait_for_their_parents_call(
    one: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a child cancel the call, whose scores come where it began."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def score() -> None:
        sender.send((factor(MODEL(JETS, pool=pool, timeout_s=60)), pool.closed))

    async def awaited() -> Any:
        return await pending

    def wait() -> None:
        for scores in (pending.result, lambda: asyncio.run(awaited())):
            try:
                scores()
            except errors.ConfigError as error:
                sender.send(str(error))
        pending.cancel()
        sender.send(factor(MODEL(JETS, timeout_s=60)))

    with sonic.connect(one.url) as pool:
        assert factor(MODEL(JETS)) == 2
        children = [context.Process(target=run, daemon=True) for run in (score, wait)]
        children[0].start()
        assert receiver.poll(60)
        assert receiver.recv() == (2, False)
        assert "forks" not in caplog.text
        before = len(one.requests)
        one.hold()
        pending = MODEL.submit(JETS)
        until(lambda: len(one.requests) > before)
        children[1].start()
        assert "this process forks while requests are in flight" in caplog.text
        for _ in range(2):
            assert receiver.poll(60)
            assert "forked child" in receiver.recv()
        one.release()
        assert factor(pending.result()) == 2
        assert receiver.poll(60)
        assert receiver.recv() == 2
        for child in children:
            child.join(60)
            assert child.exitcode == 0


def test_ctrl_c_while_a_thread_starts_leaves_one_engine(
    one: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "sonic-pool":
            monkeypatch.undo()
            raise KeyboardInterrupt

    with sonic.connect(one.url) as pool:
        before = threading.enumerate()
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            MODEL(JETS, pool=pool)
        MODEL(JETS, pool=pool)

        def engines() -> list[threading.Thread]:
            threads = [t for t in threading.enumerate() if t not in before]
            return [t for t in threads if t.name == "sonic-pool"]

        # The thread whose start was interrupted ends by itself.
        until(lambda: len(engines()) == 1)
