"""Settings come from arguments, files, profiles and variables; their copies hold no secrets."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import awkward as ak
import cloudpickle
import dask.config
import numpy as np
import pytest
import yaml

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Settings, forget

TLS = {"tls_root": "ca.pem"}
MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["v0"]})


S = "grpc://s:1"
BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("triton", {}, "did you mean 'grpc://triton:8001'"),
    ([], {}, "at least one server"),
    (S, {"max_in_fligt": 3}, "no option 'max_in_fligt'; did you mean 'max_in_flight'"),
    (S, {"max_in_flight": 0}, "max_in_flight: expected a whole number"),
    (S, {"cache_bytes": "1e9"}, "cache_bytes: expected a number of bytes"),
    (S, {"max_in_flight_bytes": float("inf")}, "max_in_flight_bytes: expected a number of bytes"),
    (S, {"headers": b"hush"}, "headers: expected .*, got bytes$"),
    (S, {"token": b"hush"}, "token: expected .*, got bytes$"),
    (S, {"token": "hush\n"}, "such as a line break, that no token has"),
    (S, {"token_file": 5}, "token_file: expected a path, got int"),
    (S, {"token_file": ""}, "token_file: expected a path, got str"),
    (S, {"headers": {"a": 1}}, "headers: expected .* got 'a' with a value of type int"),
    *(
        (S, {"headers": {name: "hush"}}, f"headers: expected names of letters, .* got {name!r}")
        for name in (1, "a b")
    ),
    (S, {"headers": {"a": "hush\n"}}, "headers: expected .* printable ASCII, .* got 'a'"),
    (S, {"headers": {"a-bin": "hush"}}, "expected .* got 'a-bin' with a value of type str"),
    *(
        (S, {"headers": {"Authorization": "hush", **more}, **options}, "authorization is given")
        for more, options in (({"authorization": "hush"}, {}), ({}, {"token": "hush"}))
    ),
    (S, {"servers_file": "s.txt"}, "expected servers or a servers_file, got both"),
    (None, {"servers_file": "no.txt"}, "cannot read the file of servers '.*no.txt'"),
    (S, {"client": "tcp://s:8786"}, "client: expected a distributed.Client .* got 'tcp://s:8786'"),
    *(
        (S, {"fallback": fallback}, f"fallback: .*{message}")
        for fallback, message in (
            ("", "at least one server"),
            ("s:8001", "did you mean 'grpc://s:8001'"),
            ("grpc://me:hush@s:1", "must not hold a secret"),
        )
    ),
    (S, {"token": "hush", "token_file": "t"}, "expected a token or a token_file, got both"),
    (S, {"max_request_bytes": 2**31}, "expected from 1 .* less than 2 GiB"),
    (S, {"shared_memory": "auto"}, "shared_memory"),
    *(
        (S, {"proxy": proxy}, "proxy: expected a URL such")
        for proxy in ("proxy:3128", "https://proxy:1", "http://me:hush@proxy:1", 5)
    ),
    (S, {"compression": "zip"}, r"expected one of gzip, deflate \(by default None\)"),
    (S, TLS, r"tls_root is for servers with TLS.*did you mean 'grpcs://s:1'"),
    (["grpcs://s:1", "grpc://i:1"], TLS, "grpc://i:1 has none"),
    ("grpcs://s:1", {"tls_cert": "a.pem"}, "tls_key is missing"),
    ("grpcs://s:1", {"tls_key": "a.key"}, "tls_cert is missing"),
    ("grpcs://s:1", {"tls_root": 5}, "tls_root: expected a path .*, got 5"),
    *(
        (S, {"retry_timeout_s": value}, "expected a number of seconds from 0.001 to 604800")
        for value in (float("inf"), float("nan"), 0, True, "60")
    ),
    *(
        (S, {f"{option}_s": "60"}, f"{option}_s: expected .*a number of seconds from")
        for option in ("request_timeout", "metadata_timeout", "hedge_after", "fallback_after")
    ),
]


@pytest.mark.parametrize(("servers", "options", "message"), BAD)
def test_bad_settings_are_named(
    servers: Any, options: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """By `connect`, without a secret, rather than by gRPC in the terminal at the first call."""
    with pytest.raises(errors.ConfigError, match=message) as caught:
        sonic.connect(servers, **options)
    assert "hush" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_numbers_are_those_of_python() -> None:
    """A clock's time plus a float32 is a float32, which is minutes off."""
    options: dict[str, Any] = {"request_timeout_s": np.float32(2.5), "hedge_after_s": np.int8(3)}
    sizes: dict[str, Any] = {"max_request_bytes": 32e6, "max_in_flight": np.int8(9)}
    settings = Settings.make("grpc://s:1", **options, **sizes)
    assert {type(getattr(settings, name)) for name in options} == {float}
    assert {type(getattr(settings, name)) for name in sizes} == {int}


def test_servers_from_configuration_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured = {"servers": ["grpc://a:1", "grpcs://b"], "max-in-flight": 3}
    # Variables of the environment arrive with an underscore.
    with dask.config.set({"sonic": {**configured, "token_file": str(tmp_path)}}):
        settings = sonic.connect().settings
        assert settings.servers == ("grpc://a:1", "grpcs://b:443")
        assert (settings.max_in_flight, settings.token) == (3, tmp_path)
        assert settings.max_request_bytes == 32_000_000
        assert sonic.connect(max_in_flight=4).settings.max_in_flight == 4
    variables = {"DASK_SONIC__SERVERS": "grpc://a:1,grpc://b:2"}
    with dask.config.set(dask.config.collect_env(variables)):
        assert sonic.connect().settings.servers == ("grpc://a:1", "grpc://b:2")
    # A job may have a balancer, for those that configure no servers.
    monkeypatch.setenv("SONIC_LOCAL_BALANCER_HOST", "node7.example")
    monkeypatch.setenv("SONIC_LOCAL_BALANCER_PORT", "8011")
    assert sonic.connect().settings.servers == ("grpc://node7.example:8011",)
    with dask.config.set({"sonic.servers": "grpc://a:1"}):
        assert sonic.connect().settings.servers == ("grpc://a:1",)


def test_the_docstring_of_connect_names_every_option() -> None:
    documented = set(re.findall(r"``(\w+)``", sonic.connect.__doc__ or ""))
    assert set(Settings(servers=()).options()) <= documented


@pytest.mark.parametrize(
    ("memory_bytes", "threads", "in_flight_bytes", "chunks"),
    [
        (None, 1, 128e6, 4),
        (16e9, 4, 128e6, 2),
        (8e9, 1, 128e6, 4),
        (2e9, 1, 62.5e6, 1),
        (2e9, 4, 62.5e6, 1),
        (0.5e9, 1, 15.625e6, 1),
    ],
)
def test_limits_by_the_memory_of_a_worker(
    memory_bytes: float | None, threads: int, in_flight_bytes: float, chunks: int
) -> None:
    limits = Settings.make("grpc://a:1")
    assert limits.in_flight_bytes(memory_bytes) == in_flight_bytes
    assert limits.suspended_chunks(memory_bytes, threads) == chunks
    own = Settings.make("grpc://a:1", max_in_flight_bytes=5, max_suspended_chunks=0)
    assert (own.in_flight_bytes(memory_bytes), own.suspended_chunks(memory_bytes, 1)) == (5, 0)


def test_the_example_of_sites_is_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    path = Path(__file__).parents[2] / "examples" / "facilities" / "sonic.yaml"
    with dask.config.set(yaml.safe_load(path.read_text())):
        profiles = set(Settings.profiles())
        made = {p: Settings.from_config(p) for p in profiles - {"batch"}}
        with pytest.raises(errors.ConfigError, match=r"servers '/shared/triton/servers.txt' on"):
            Settings.from_config("batch")
        assert Settings.from_config() == made["inside"]
    assert {"inside", "ingress", "direct", "small-slots"} == made.keys()
    ingress = made["ingress"]
    assert ingress is not None
    assert ingress.token == Path("/shared/tokens/ada")
    assert ingress.servers == ("grpcs://sonic.example:443",)


def test_options_make_the_same_settings() -> None:
    settings = Settings.make("grpcs://a:1", tls_root="ca.pem", cache="scores", hedge_after_s=2)
    assert (settings.retry_timeout_s, settings.hedge_after_s) == (60, 2)
    assert Settings.make(settings.servers, **settings.options()) == settings
    assert settings.with_options(tls_root=None).tls_root is None
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_secrets_are_in_no_repr_and_no_pickle(tagger: sonic.Model) -> None:
    pool = sonic.connect("grpc://s:1", token="hush-token", headers={"key": "hush-header"})
    model = pickle.dumps(tagger)
    assert b"s:1" in model
    for shown in (repr(pool), repr(pool.settings), model.decode("latin1")):
        assert "hush" not in shown
    pool.close()
    assert b"s:1" not in pickle.dumps(tagger)


@dataclass
class Source:
    secret: str = field(repr=False)

    def __call__(self) -> str:
        return self.secret


def test_equal_options_have_one_pool_and_others_a_pool_of_their_own() -> None:
    """Of functions, it is not their text that is compared; headers are those of their time."""
    ada, bob = Source("hush-ada"), Source("hush-bob")
    assert repr(ada) == repr(bob)
    tokens = [ada, bob, ada.__call__, bob.__call__]
    fallbacks = [lambda: "grpc://f:1", lambda: "grpc://g:1", "grpc://f:1"]
    options: list[dict[str, Any]] = [{"token": token} for token in tokens]
    options += [{"fallback": fallback} for fallback in fallbacks]
    options += [{"headers": headers} for headers in ({"x-user": "ada"}, {"x-user": "bob"})]
    pools = [sonic.connect(S, **each) for each in options]
    assert len(set(pools)) == len(options)
    for pool, each in zip(pools, options, strict=True):
        assert sonic.connect(S, **each) is pool
        # Each pickle makes a function; a chunk would have connections, and a fallback, of its own.
        assert "fallback" not in each or cloudpickle.loads(cloudpickle.dumps(pool)) is pool
    options[-1]["headers"]["x-user"] = "eve"
    assert pools[-1].settings.headers == {"x-user": "bob"}
    assert sonic.connect(S, **options[-1]) not in pools


@pytest.mark.parametrize(("option", "as_it_is"), [("fallback", "unix:/s"), ("cache", "~/scores")])
def test_paths_stay_the_same_in_another_folder(
    option: str, as_it_is: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    expected = {"here": str(tmp_path / "here"), as_it_is: as_it_is}
    for path in ("here", Path("here"), as_it_is):
        settings = Settings.make(S, **{option: path})
        assert getattr(settings, option) == expected[str(path)]


def test_servers_without_tls_do_not_replace_servers_with_it(tmp_path: Path) -> None:
    """They would get tokens and rows as plain text."""
    pool = sonic.connect("grpcs://a:1", tls_root=str(tmp_path / "ca.pem"))
    with pytest.raises(errors.ConfigError, match="did you mean 'grpcs://b:1'"):
        pool.set_servers("grpc://b:1")
    assert pool.settings.servers == ("grpcs://a:1",)


CONFIGURED = {"sonic.servers": ["grpc://configured:1"], "sonic.token": "$SONIC_TEST_TOKEN"}


@pytest.mark.parametrize("profile", [None, "inside"])
def test_secrets_of_the_configuration_are_found_there(
    tagger: sonic.Model, monkeypatch: pytest.MonkeyPatch, profile: str | None
) -> None:
    monkeypatch.setenv("SONIC_TEST_TOKEN", "hush")
    inside = {"servers": "grpc://inside:1", "token": "$SONIC_TEST_TOKEN"}
    with dask.config.set({**CONFIGURED, "sonic.profiles": {"inside": inside}}):
        connected = sonic.connect(profile=profile).settings
        pickled = pickle.dumps(tagger)
        assert b"hush" not in pickled
        forget()
        copied = pickle.loads(pickled)
        assert copied.pool_of_pickle.settings == connected


def test_secrets_that_cannot_be_found_are_named() -> None:
    sonic.connect("grpc://s:1", token="hush", headers={"key": "hush"})
    pickled = pickle.dumps(MODEL)
    forget()
    model = pickle.loads(pickled)
    with pytest.raises(errors.ConfigError, match=r"given token= and headers= in another process"):
        model(ak.zip({"pt": [1.0]}))


def test_the_file_of_defaults_says_what_the_defaults_are() -> None:
    import sonic_coffea

    text = (Path(sonic_coffea.__file__).parent / "sonic.yaml").read_text()
    written = yaml.safe_load(text)["sonic"]
    options = {key.replace("-", "_"): value for key, value in written.items()}
    assert options.pop("token_file") is None
    assert options.pop("profile") is None
    assert options.pop("profiles") == {}
    assert options.pop("local") == {"runtime": "auto", "image": None}
    assert options.pop("servers") is None
    assert options == Settings.make("grpc://a:1").options()


PROFILES = {
    "site": {"servers": ["grpcs://triton.site.example"], "token-file": "/t", "retry-timeout-s": 60},
    "lab": {"servers": "grpc://lab.example:8001", "max-in-flight": 7},
}


def test_profiles() -> None:
    with dask.config.set({"sonic.profiles": PROFILES, "sonic.max-in-flight": 9}):
        site = sonic.connect(profile="site", channels=2).settings
        assert site.servers == ("grpcs://triton.site.example:443",)
        assert (site.token, site.retry_timeout_s, site.channels) == (Path("/t"), 60, 2)
        assert site.max_in_flight == 9
        with dask.config.set({"sonic.profile": "lab"}):
            lab = sonic.connect().settings
            assert (lab.servers, lab.max_in_flight) == (("grpc://lab.example:8001",), 7)


TOKENS = {"text": {"token": "own"}, "file": {"token-file": "/own"}}
GIVEN: list[tuple[Any, Any]] = [
    ("own", {"profile": "text"}),
    ("own", {"token": "own"}),
    (Path("/own"), {"profile": "file"}),
    (Path("/own"), {"token_file": "/own"}),
]


def test_the_token_of_a_profile_or_a_call_replaces_the_one_of_the_configuration() -> None:
    profiles = {name: {"servers": S, **own} for name, own in TOKENS.items()}
    for configured in ({"token-file": "/all"}, {"token": "all"}):
        with dask.config.set({"sonic": {"servers": S, "profiles": profiles, **configured}}):
            for own, given in GIVEN:
                assert sonic.connect(**given).settings.token == own


LAB = {"profile": "lab"}


@pytest.mark.parametrize(
    ("configured", "options", "message"),
    [
        ({}, {}, "no servers named"),
        ({"retry-fro-s": 3}, {}, "'retry_fro_s'; did you mean 'retry_timeout_s'"),
        # They would be sent as they are.
        ({"token": "$SONIC_UNSET"}, {}, "sonic.token: .* no variable 'SONIC_UNSET'"),
        ({"token": "/t/${SONIC_UNSET}"}, {}, "sonic.token: .* no variable 'SONIC_UNSET'"),
        ({"token": "hush", "token-file": "/t"}, {}, "a token or a token_file, got both"),
        ({"servers-file": "/s"}, {}, "servers or a servers_file, got both"),
        ({"profiles": PROFILES}, {"profile": "sit"}, "no profile 'sit'; did you mean 'site'"),
        ({"profiles": PROFILES}, {"servers": S, **LAB}, "servers or a profile, got both"),
        ({"profiles": ["lab"]}, LAB, "profiles: expected a mapping of names to options"),
        ({"servers": S, 3: 4}, {}, "connect has no option '3'"),
        ({"profiles": {"lab": "grpc://a:1"}}, LAB, "expected a mapping of options under sonic"),
    ],
)
def test_bad_configurations_are_named(configured: Any, options: Any, message: str) -> None:
    servers = {"servers": "grpc://a:1"} if configured else {}
    with (
        dask.config.set({"sonic": {**servers, **configured}}),
        pytest.raises(errors.ConfigError, match=message),
    ):
        sonic.connect(**options)


def test_files_of_servers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "servers.txt"
    path.write_text("# ours\ngrpc://a:1\n\n  grpc://b:1  # new\n")
    assert sonic.connect(path).settings.servers == ("grpc://a:1", "grpc://b:1")
    with dask.config.set({"sonic.servers-file": str(path)}):
        assert sonic.connect().settings.servers_file == str(path)
    named = sonic.connect(servers_file=str(path), channels=2).settings
    assert (named.servers_file, named.channels) == (str(path), 2)
    assert named.servers == ("grpc://a:1", "grpc://b:1")
    path.write_text("a:1\n")
    with pytest.raises(errors.ConfigError, match="did you mean 'grpc://a:1'"):
        sonic.connect(path)
    with pytest.raises(errors.ConfigError, match="cannot read the file of servers"):
        sonic.connect(tmp_path / "nowhere")
