"""A dask cluster of processes, and arrays that are read from files when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import awkward as ak
import dask_awkward as dak
import pytest
from distributed import Client, LocalCluster


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """The client of two workers with one thread each, which import what they need once."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def as_lazy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ak.Array, int], Any]:
    """Return what makes an array lazy, with some rows in each of its partitions."""

    def make(array: ak.Array, rows: int) -> Any:
        path = tmp_path_factory.mktemp("lazy") / "array.parquet"
        ak.to_parquet(array, path, row_group_size=rows)
        lazy = dak.from_parquet(str(path), split_row_groups=True)
        assert lazy.npartitions > 2
        return lazy

    return make
