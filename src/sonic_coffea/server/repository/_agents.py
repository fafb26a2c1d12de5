"""Repository agents: what Triton does with a model's files before it loads them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.server.repository._config import read_config
from sonic_coffea.transport import write_model_config

_FIELD = "model_repository_agents"


def check_agents(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare the checksums of a model's files, as its repository agent would.

    Raise if a checksum differs, or the agent is not ``checksum``.
    """
    for agent in config.get(_FIELD, {}).get("agents", ()):
        if agent.get("name") != "checksum":
            raise ConfigError(
                f"model {folder.name!r} asks for repository agent {agent.get('name')!r}; without "
                "NVIDIA's container there is only 'checksum': choose a container as the runtime"
            )
        for key, expected in agent.get("parameters", {}).items():
            method, _, file = key.partition(":")
            if method != "MD5" or not (folder / file).is_file():
                raise ConfigError(
                    f"expected a checksum of model {folder.name!r} as 'MD5:' and the name of a "
                    f"file in {folder}, got {key!r}"
                )
            content = (folder / file).read_bytes()
            got = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if got != expected:
                raise ConfigError(
                    f"expected {folder / file} to have the MD5 checksum {expected} of its "
                    f"config.pbtxt, got {got}: the file is damaged, or of another version"
                )


def without_agents(repository: Path, *, polled: bool) -> Path | None:
    """Check the models that ask for agents; return links to serve without agents.

    Returns None if no model asks for one.
    """
    asking: dict[str, dict[str, Any]] = {}
    for path in repository.glob("*/config.pbtxt"):
        if _FIELD.encode() in path.read_bytes():
            config = read_config(path.parent)
            check_agents(path.parent, config)
            asking[path.parent.name] = {k: v for k, v in config.items() if k != _FIELD}
    if not asking:
        return None
    if polled:
        raise ConfigError(
            "models that ask for repository agents are checked when the server starts, which "
            "poll=True cannot do; leave it out"
        )
    links = Path(tempfile.mkdtemp(prefix=f"sonic-coffea-repository-{os.getpid()}-"))
    for model in repository.iterdir():
        if model.name not in asking:
            (links / model.name).symlink_to(model)
            continue
        (links / model.name).mkdir()
        for part in model.iterdir():
            if part.name != "config.pbtxt":
                (links / model.name / part.name).symlink_to(part)
        config_file = links / model.name / "config.pbtxt"
        config_file.write_text(write_model_config(asking[model.name]), encoding="utf-8")
    return links
