"""Declares a served model from its contract, with fields to fill in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonic_coffea.errors import ContractError, SonicError
from sonic_coffea.model import inputs_of
from sonic_coffea.model import scaffold as declaration_of
from sonic_coffea.transport import Contract, connect_transport

if TYPE_CHECKING:
    from sonic_coffea.pool import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold:
    """A declaration of a served model, with names to fill in.

    Attributes
    ----------
    contract : Contract
        What the server says of the model.
    layouts : mapping
        A layout for each input, as Python.
    labels : mapping
        The labels of outputs whose configuration names a file of them.
    text : str
        The declaration, as Python.
    """

    contract: Contract
    layouts: Mapping[str, str]
    labels: Mapping[str, list[str]]
    text: str


def scaffold(settings: Settings, model: str, version: str | None = None) -> Scaffold:
    """Return a declaration that fits a served model.

    Parameters
    ----------
    settings : Settings
        One server, and how it is connected.
    model, version : str
        What is declared.

    Raises
    ------
    ContractError
        If the server lists no tensors, so that there is nothing to write it from.
    """
    server = settings.servers[0]
    with connect_transport(server, options=settings.connection_options()) as connection:
        contract = connection.contract(model, version)
        if not contract.lists_tensors:
            raise ContractError(
                "the server does not list what the model takes and gives, so that its declaration "
                "cannot be written from that",
                server=server,
                model=model,
                version=contract.version,
            )
        labels: Mapping[str, list[str]] = {}
        with contextlib.suppress(SonicError):  # a model that does not take a row of zeros
            labels = connection.labels(contract, version)
    text = declaration_of(contract, labels, server=server)
    return Scaffold(contract=contract, layouts=inputs_of(contract), labels=labels, text=text)
