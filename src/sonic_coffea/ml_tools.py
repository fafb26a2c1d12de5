"""coffea's `triton_wrapper` on the pool, for code that was written for it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import awkward as ak
import ml_dtypes  # noqa: F401  adds bfloat16 to numpy
import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, ContractError, InputError, expect, require
from sonic_coffea.layouts import (
    Output,
    Outputs,
    Segment,
    is_lazy,
    is_tracer,
    over_partitions,
)
from sonic_coffea.pool import Call, Pool, Settings, WithPool, rows_per_request, shared
from sonic_coffea.transport import DATATYPES, STRINGS, Address, Contract, TensorSpec

__all__ = ["triton_wrapper"]

Tensor = NDArray[Any]

# Arguments of tritonclient that are used, or that the pool's connections do not need.
_CLIENT_ARGS = ("ssl", "root_certificates", "verbose", "keepalive_options", "channel_args")


class triton_wrapper(WithPool, ABC):  # noqa: N801  what the code is written for
    """A model on a server, for arrays that `prepare_awkward` packs by hand.

    It has the interface of ``coffea.ml_tools.triton_wrapper``: subclass it, and define
    `prepare_awkward`. New code is shorter with `sonic_coffea.Model`.

    Rows go through the pool of this process if `sonic_coffea.connect` has named the server.
    Otherwise, all wrappers with the same server and arguments share a pool.

    Parameters
    ----------
    model_url : str
        ``triton+grpc://host:port/model/version``; without a version, what the server's policy
        serves.
    client_args : dict, optional
        tritonclient's arguments: ``ssl``, which is on if it is not given, ``root_certificates``;
        ``verbose``, ``keepalive_options`` and ``channel_args`` have no effect.
    batch_size : int
        Greatest number of rows of a request; if negative, the server's preferred or greatest one.

    Attributes
    ----------
    max_retry_attempts, retry_jitter_base_ms : int
        coffea's number of retries, and the scale of its back-off. The rows of a lost server are
        retried for as long as coffea's retries can take; ``retry_timeout_s`` of
        `sonic_coffea.connect` overrides this.

    Examples
    --------
    >>> from sonic_coffea.ml_tools import triton_wrapper
    >>> class tagger(triton_wrapper):
    ...     def prepare_awkward(self, output_list, jets):
    ...         features = ak.concatenate([jets.pt[:, None], jets.eta[:, None]], axis=1)
    ...         return [], {"output_list": output_list, "input_dict": {"features": features}}
    >>> tagger("triton+grpc://triton.example:8001/tagger/1", client_args={"ssl": False})
    <tagger: model tagger, version 1 at grpc://triton.example:8001>
    """

    max_retry_attempts = 5
    retry_jitter_base_ms = 100

    def __init__(
        self, model_url: str, client_args: Mapping[str, Any] | None = None, batch_size: int = -1
    ) -> None:
        options = {"ssl": True, **(client_args or {})}
        passed = [name for name, value in options.items() if value is not None]
        require(passed, _CLIENT_ARGS, "client_args has no use for")
        if options["ssl"]:
            model_url = model_url.replace("triton+grpc://", "triton+grpcs://", 1)
        address = replace(Address.parse(model_url), tls=bool(options["ssl"]))
        if address.model is None:
            raise ConfigError(f"expected triton+grpc://host:port/model/version, got {model_url!r}")
        is_size = isinstance(batch_size, Integral) and batch_size != 0
        expected = "a whole number of at least 1, or -1 for the server's own"
        expect(is_size, expected, batch_size, "batch_size")
        self.model = address.model
        self.version = address.version
        self._url = address.url
        # Not the file of this name in the folder of a later call.
        tls_root = options.get("root_certificates")
        self._tls_root = Settings.make(self._url, tls_root=tls_root).tls_root
        self._batch_size = batch_size

    def __repr__(self) -> str:
        version = f", version {self.version}" if self.version else ""
        return f"<{type(self).__name__}: model {self.model}{version} at {self._url}>"

    @abstractmethod
    def prepare_awkward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Make the arrays ready, with awkward's functions or those of dask-awkward.

        Returns
        -------
        tuple
            Positional and keyword arguments of `numpy_call`, with arrays that awkward can make
            numpy arrays of: ``[], {"output_list": [name], "input_dict": {name: array}}``.
        """

    def postprocess_awkward(self, return_array: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call, from its awkward arrays by output and its arguments."""
        del args, kwargs
        return return_array

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Score the arrays that `prepare_awkward` makes of the arguments.

        Parameters
        ----------
        *args, **kwargs
            Of `prepare_awkward`. If no awkward array is among them, they are those of
            `numpy_call`. Of dask-awkward arrays, nothing is sent before they are computed.

        Returns
        -------
        dict
            An awkward array for each output, or a numpy array if the inputs are, or what
            `postprocess_awkward` makes of them.

        Raises
        ------
        InputError
            If arrays hold None, no numbers, or numbers that the model's type cannot hold, differ in
            length, or only some of them are lazy.
        ContractError
            If the model has other inputs or outputs, or of other shapes.
        """
        arrays = [*args, *kwargs.values()]
        eager = any(isinstance(a, ak.Array) for a in arrays)
        lazy = any(is_lazy(a) for a in arrays)
        if eager and lazy:
            raise InputError("some arrays are lazy and others are not; compute all or none")
        if not eager and not lazy:
            return self.numpy_call(*args, **kwargs)
        prepared, named = self.prepare_awkward(*args, **kwargs)
        score = self._score_lazy if lazy else self._score
        return self.postprocess_awkward(score(*prepared, **named), *args, **kwargs)

    @property
    def pool(self) -> Pool:
        """The pool that the rows go through."""
        pauses = 2 ** (self.max_retry_attempts + 1) - 1
        retry_timeout_s = pauses * self.retry_jitter_base_ms / 1000
        options = {"retry_timeout_s": retry_timeout_s, "tls_root": self._tls_root}
        return shared(Settings.make(self._url, **options), self.pool_of_pickle)

    @property
    def batch_size(self) -> int:
        """Rows of a full request, unless its bytes are the limit."""
        contract = self._contract()
        return rows_per_request(
            0, max_rows=contract.max_rows, preferred_rows=contract.preferred_rows, max_bytes=1 << 31
        )

    def validate_numpy_input(
        self, output_list: Sequence[str], input_dict: Mapping[str, Tensor]
    ) -> None:
        """Compare inputs and outputs with the server's model, before the first row leaves.

        Warns of inputs that will be converted to the model's type.

        Raises
        ------
        InputError, ContractError
            As `__call__`.
        """
        for name, tensor in input_dict.items():
            _check_usable(name, tensor)
        contract = self._contract()
        types = _types(contract, input_dict)
        contract.check(
            # Where there is no row, awkward does not always know the shape that it would have.
            {n: (types[n], t.shape[1:] if len(t) else None) for n, t in input_dict.items()},
            dict.fromkeys(output_list, (None, None)),
            server=", ".join(self.pool.settings.servers),
        )
        for name, tensor in input_dict.items():
            if len(tensor) and tensor.dtype != types[name]:
                _check_held(name, tensor, types[name])
                warnings.warn(
                    f"input {name!r} of model {self.model!r} is {tensor.dtype} and is converted to "
                    f"{types[name]}, which the model takes",
                    UserWarning,
                    stacklevel=2,
                )

    def numpy_call(
        self, output_list: Sequence[str], input_dict: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Score numpy arrays, several requests at a time, and wait for the answers.

        Parameters
        ----------
        output_list : sequence of str
            Names of outputs.
        input_dict : mapping
            An array for each input, with as many rows.

        Returns
        -------
        dict
            An array for each output, with as many rows.

        Raises
        ------
        InputError, ContractError
            As `__call__`.
        SonicError
            If rows could not be scored, naming server, model and rows.
        """
        self.validate_numpy_input(output_list, input_dict)
        rows = {name: len(tensor) for name, tensor in input_dict.items()}
        if len(set(rows.values())) > 1:
            shown = ", ".join(f"{name} {n}" for name, n in rows.items())
            raise InputError(f"inputs have different numbers of rows: {shown}", model=self.model)
        pool, contract = self.pool, self._contract()
        inputs: Any = _Tensors(contract, input_dict)
        if not len(inputs):
            specs = {spec.name: spec for spec in contract.outputs}
            return contract.received({name: _nothing(specs.get(name)) for name in output_list})
        outputs = Outputs.of({name: Output() for name in output_list}, inputs)
        call = Call(contract, inputs, outputs.place, outputs.tensors, version=self.version)
        pool.submit(call)
        call.wait(None)
        call.raise_failure()
        return {name: output.tensor for name, output in outputs.each.items()}

    def _contract(self) -> Contract:
        """Return the model's contract, with the batch size of the wrapper."""
        contract = self.pool.contract(self.model, self.version)
        if self._batch_size < 0:
            return contract
        rows = min(self._batch_size, contract.max_rows or self._batch_size)
        return replace(contract, max_rows=rows, preferred_rows=())

    def _score(
        self, output_list: Sequence[str], input_dict: Mapping[str, Any]
    ) -> dict[str, ak.Array]:
        scores = self.numpy_call(output_list, _as_numpy(input_dict))
        return {name: ak.from_numpy(score) for name, score in scores.items()}

    def _score_lazy(
        self, output_list: Sequence[str], input_dict: Mapping[str, Any]
    ) -> dict[str, Any]:
        from dask.base import tokenize

        score = partial(self._score_partition, tuple(output_list))
        token = tokenize(self, tuple(output_list))
        scores = over_partitions(score, dict(input_dict), label=f"sonic-{self.model}", token=token)
        return {name: scores[name] for name in scores.fields}

    def _score_partition(
        self, output_list: Sequence[str], input_dict: Mapping[str, Any]
    ) -> ak.Array:
        """Score a partition; of a partition without data, return scores without data."""
        tracing = is_tracer(input_dict)
        known = {n: ak.typetracer.length_one_if_typetracer(a) for n, a in input_dict.items()}
        tensors = _as_numpy(known)
        if tracing:
            # Types and shapes of arrays without data are checked on a row that is not sent.
            self.validate_numpy_input(output_list, tensors)
            tensors = {n: t[:0] for n, t in tensors.items()}
        scores = self.numpy_call(output_list, tensors)
        specs = {s.name: s for s in self._contract().outputs}
        unlisted = [name for name in scores if name not in specs]
        if unlisted:
            raise ContractError(
                f"the server does not list what it gives, such as {unlisted[0]!r}, which lazy "
                "arrays have to know; declare it by sonic_coffea.Model",
                model=self.model,
            )
        fields = {name: _with_lists(score, specs[name]) for name, score in scores.items()}
        record = ak.zip(fields, depth_limit=1)
        return ak.Array(record.layout.to_typetracer(forget_length=True)) if tracing else record


class _Tensors:
    """The rows of numpy arrays, packed for the pool's requests."""

    def __init__(self, contract: Contract, tensors: Mapping[str, Tensor]) -> None:
        self._types = _types(contract, tensors)
        self._tensors = tensors
        self.rows = range(len(next(iter(tensors.values()))))
        row_bytes = sum(
            int(np.prod(t.shape[1:])) * self._types[n].itemsize for n, t in tensors.items()
        )
        self.segments = [Segment(0, len(self), row_bytes)]

    def __len__(self) -> int:
        return len(self.rows)

    def pack(self, start: int, stop: int) -> dict[str, Tensor]:
        rows = slice(start, stop)
        return {n: t[rows].astype(self._types[n], copy=False) for n, t in self._tensors.items()}

    def selection(self, start: int, stop: int) -> slice:
        return slice(start, stop)

    def events_of(self, start: int, stop: int) -> None:
        """Return None, as the events of the rows are not known."""


def _types(contract: Contract, tensors: Mapping[str, Tensor]) -> dict[str, np.dtype[Any]]:
    """Return the model's type of each input; its own if the server does not list the input.

    Bytes are sent in the order of this machine.
    """
    served = {s.name: DATATYPES.get(s.datatype) for s in contract.inputs}
    each = {name: np.dtype(served.get(name) or t.dtype) for name, t in tensors.items()}
    return {name: dtype.newbyteorder("=") for name, dtype in each.items()}


def _as_numpy(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: ak.to_numpy(a) if isinstance(a, ak.Array) else a for n, a in arrays.items()}


def _check_usable(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, (np.ndarray, np.generic)):
        raise InputError(f"input {name!r} is {type(tensor).__name__}; expected a numpy array")
    if np.ma.is_masked(tensor):
        raise InputError(f"input {name!r} has None in it; fill it with ak.fill_none")
    if tensor.ndim == 0:
        raise InputError(f"input {name!r} is one number; expected an array with an axis of rows")
    if tensor.dtype == STRINGS or tensor.dtype.name not in DATATYPES.values():
        raise InputError(f"input {name!r} is {tensor.dtype}; expected numbers of a KServe type")


def _check_held(name: str, tensor: Tensor, target: np.dtype[Any]) -> None:
    """Refuse numbers that the model's type would change by more than rounding."""
    if np.can_cast(tensor.dtype, target):  # as to a wider type, and to strings
        return
    with np.errstate(all="ignore"):
        converted = tensor.astype(target)
    is_whole = target.kind in "iub"
    wrong = converted != tensor if is_whole else np.isfinite(tensor) & ~np.isfinite(converted)
    for value in tensor[wrong][:1]:
        raise InputError(f"input {name!r} has {value}, which {target} cannot hold")


def _nothing(spec: TensorSpec | None) -> Tensor:
    """Return an output of no rows."""
    if spec is None:  # the server does not list it
        return np.empty(0, np.float32)
    return np.empty((0, *(max(n, 0) for n in spec.shape)), DATATYPES[spec.datatype])


def _with_lists(score: Tensor, spec: TensorSpec) -> ak.Array:
    """Return an array with lists where the model's shape is free: partitions may differ there."""
    array = ak.from_numpy(score)
    for axis, length in enumerate(spec.shape, 1):
        if length < 0:
            array = ak.from_regular(array, axis)
    return array
