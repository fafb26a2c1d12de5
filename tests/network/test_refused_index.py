"""SuperSONIC's proxy, which refuses the index of models, without a word, while it is saturated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.commands import run
from tests.network.envoy import REFUSED_INDEX

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.network.tritons import Triton
    from tests.scored import Scored


@pytest.fixture
def url(two_tritons: list[Triton], envoy: Any) -> Iterator[str]:
    with envoy(two_tritons, lua=REFUSED_INDEX) as running:
        yield running.url


def test_inference_goes_on(url: str, scored: Scored) -> None:
    with Pool(Settings.make(url)) as pool:
        scored(pool)
        assert pool.statistics.total().retries == 0
        with pytest.raises(errors.ModelNotFoundError, match="taggr"):
            pool.contract("taggr", None)


def test_what_it_means_is_said(url: str) -> None:
    connection = connect_transport(url)
    with pytest.raises(errors.OverloadError, match="admits no new clients at the moment"):
        connection.models()
    connection.close()
    listed = run("models", url)
    assert listed.returncode == 1
    assert "admits no new clients at the moment" in listed.stderr.replace("\n", " ")
    assert "Traceback" not in listed.stderr
    checked = run("check", url, "--json")
    assert checked.returncode == 0
    steps = {step["name"]: step for step in json.loads(checked.stdout)["steps"]}
    assert "admits no new clients" in steps["models"]["detail"]
    checked = run("check", url, "tagger", "--json")
    assert checked.returncode == 0
