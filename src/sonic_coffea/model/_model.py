"""A model as an analysis declares it: its inputs, its outputs, and the call."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, DeadlineError, InputError, ServerError, brief
from sonic_coffea.layouts import Layout, check_index, features_by_name, has_no_data
from sonic_coffea.model import _weaver as weaver
from sonic_coffea.model._declaration import Declaration
from sonic_coffea.model._export import check_export, export
from sonic_coffea.model._pending import Pending
from sonic_coffea.model._scaffold import contract_of_file, filled_in
from sonic_coffea.model._submission import Submission
from sonic_coffea.model._yaml_file import read as read_yaml
from sonic_coffea.pool import Deadline, Pool, open_transport
from sonic_coffea.reuse import Variations
from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)


class Model(Declaration):
    """A served model: a layout for each input, and labels for each output.

    Parameters
    ----------
    name : str
        Name of the model in the server's model repository.
    inputs : mapping
        Names of inputs, each with its layout.
    outputs : mapping
        Names of outputs, each with the labels of its values, an `Output`, or None for a number.
    version : str or int, optional
        A pinned version; by default, the server's version policy decides.
    one_request_per : {"row", "event"}, optional
        Sends one request for each row, or for all rows of an event. It is meant for networks
        without a batch axis, such as a network that takes a single graph. By default, rows share
        requests.
    parameters : mapping, optional
        Parameters that each request carries besides tensors: names, each with a bool, int, float
        or str.
    priority : int, optional
        Priority of the requests in the server's queue: 1 goes before 2. The model's configuration
        has the number of levels.
    server_timeout_s : float, optional
        Longest time of a request in the server's queue, if the model's queue policy allows the
        override. A request that waited longer is retried, as after an overload.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> model = sonic.Model(
    ...     "toptagger",
    ...     inputs={"features": sonic.Padded(["pf.pt", "pf.eta"], 64), "mask": sonic.Mask(64)},
    ...     outputs={"scores": ["qcd", "top"]},
    ... )
    >>> model
    Model('toptagger', inputs: features (pf.pt, pf.eta), mask; outputs: scores (qcd, top))
    """

    @classmethod
    def from_weaver(  # noqa: PLR0913  independent options, each with a default
        cls,
        name: str,
        preprocess: str | Path | Mapping[str, Any],
        *,
        output: str | None = None,
        prefix: str | Mapping[str, str] = "",
        labels: str | Path | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        inputs: Mapping[str, Layout] | None = None,
        version: str | int | None = None,
        order: str = "cmssw",
        pad_mode: str = "constant",
    ) -> Model:
        """Declare a model by the preprocessing file that weaver wrote and the CMS software reads.

        Parameters
        ----------
        name : str
            Name of the model in the server's model repository.
        preprocess : path or mapping
            ``preprocess.json``, or its content.
        output : str, optional
            Name of the model's output tensor; its labels are the file's ``output_names``. By
            default ``"softmax"``, or ``"softmax__0"`` if the inputs' names end with their
            positions, as in TorchScript exports.
        prefix : str or mapping
            Path of the variables in the arrays, such as ``"pf."``; or a mapping by input or group:
            ``{"pf": "pf.", "sv": "sv."}`` for ``pf_features``, ``sv_points`` and so on.
        labels : sequence of str or path, optional
            Labels of the output's values, instead of ``output_names``. A path names a file with one
            label in each line, such as Triton's label files.
        rename : mapping, optional
            Names in the file, each with its new name: of variables, if the arrays have other names
            (before the prefix), and of inputs, if the served model has other names.
        inputs : mapping, optional
            Layouts that replace single inputs of the file, by the served model's names.
        version : str or int, optional
            A pinned version.
        order : {"cmssw", "weaver"}
            When NaN and ±inf are replaced: first, as the CMS software does, or after shift, scale
            and limits, as weaver does in training and validation, so that ±inf becomes a limit.
        pad_mode : {"constant", "wrap"}
            ``"wrap"`` is weaver's ``pad_mode: wrap``, which the file does not hold: a row repeats
            its constituents, and one without is 0.

        Raises
        ------
        ConfigError
            If the file lacks something, such as names for the values of the output.

        Examples
        --------
        >>> group = {"var_names": ["pt"], "var_infos": {"pt": {}}, "var_length": 2}
        >>> file = {"input_names": ["pf_features"], "pf_features": group}
        >>> Model.from_weaver("tagger", file, labels=["qcd", "top"], rename={"pt": "pf.pt"})
        Model('tagger', inputs: pf_features (pf.pt); outputs: softmax (qcd, top))
        """
        layouts, names = weaver.read(preprocess, prefix, labels, rename, inputs, order, pad_mode)
        return cls(name, layouts, {output or weaver.usual_output(layouts): names}, version)

    @classmethod
    def from_onnx(
        cls,
        path: str | Path,
        name: str | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        version: str | int | None = None,
    ) -> Model:
        """Declare a model by its ONNX file, which has the names, types and shapes of the tensors.

        Parameters
        ----------
        path : path
            The file; it need not be that of the server. The package ``onnx`` reads it.
        name : str, optional
            Name of the model in the server's model repository; by default, the file's name.
        inputs : mapping
            For each input, its fields in the order of the training; or a layout, where the file
            does not tell what the numbers mean: of masks, pairs, lists of any length, and as many
            fields as constituents.
        outputs : mapping, optional
            Labels of outputs, or an `Output`, as in `Model`. By default, numbers of the file's
            shape.
        version : str or int, optional
            A pinned version.

        Raises
        ------
        ConfigError
            If the file cannot be read, or an input has not as many fields; the message shows what
            to fill in.
        ContractError
            If a layout does not make what the file takes.
        """
        contract = contract_of_file(Path(path), name)
        filled = filled_in(contract, Path(path), inputs or {}, outputs or {})
        model = cls(contract.model, *filled, version)
        model.compare(contract, server=str(path))
        return model

    @classmethod
    def from_xgboost(
        cls,
        name: str,
        path: str | Path,
        *,
        fields: Any = None,
        labels: Sequence[str] | None = None,
        version: str | int | None = None,
    ) -> Model:
        """Declare trees by their XGBoost or LightGBM file, which has the names of the features.

        Parameters
        ----------
        name : str
            Name of the model in the server's model repository.
        path : path
            The file that `build_repository` serves.
        fields : sequence or mapping, optional
            The fields, in the order of the features, whose names they are compared with; or a
            mapping with the fields of other names: ``{"pt": "Photon.pt"}``. By default, the file's
            names.
        labels : sequence of str, optional
            Labels of the scores. By default, a number, or for several classes an array.
        version : str or int, optional
            A pinned version.

        Raises
        ------
        ConfigError
            If the file cannot be read, has no names where no fields are given, or other names.
        """
        contract = contract_of_file(Path(path), name)
        (features,), (scores,) = contract.inputs, contract.outputs
        known = features_by_name(fields, contract.features, features.shape[0], str(path))
        tensors = {features.name: known}, {scores.name: labels}
        model = cls(name, *filled_in(contract, Path(path), *tensors), version)
        model.compare(contract, server=str(path))
        return model

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], name: str | None = None) -> Model:
        """Read a declaration from a YAML file.

        Parameters
        ----------
        path : path
            The file has ``model``, ``inputs`` and ``outputs``. An input has ``layout``, the name of
            a layout, and the layout's arguments. A field is a name, a number, or the arguments of a
            `Feature` or a `OneHot`; fields may be the arguments of `Scaled`. An output is a list of
            labels, nothing, or the arguments of an `Output`. Further keys are other arguments of
            `Model`, such as ``version``.
        name : str, optional
            The model's name, instead of the file's.

        Raises
        ------
        ConfigError
            If something in the file cannot be used; the message names the place, and what fits.
        """
        return cls(**read_yaml(Path(path), name))

    def check(self, pool: Pool | None = None) -> Contract:
        """Compare the declaration with the server's model, and return the server's contract.

        Raises
        ------
        ContractError
            If they differ; the message shows both side by side, and a declaration that would fit.
        ModelNotFoundError, ServerLostError, AccessError
            If no server describes the model.
        """
        pool = self.pool_of(pool)
        contract = pool.contract(self.name, self.version, anew=True)
        checked = self.compare(contract, server=", ".join(pool.settings.servers))
        for server in pool.settings.servers:
            with contextlib.suppress(ServerError, ConfigError, DeadlineError):
                options = pool.settings.connection_options()
                with open_transport(server, options=options) as connection:
                    labels = connection.labels(contract)
                for note in self.compare_labels(labels, contract, server=server):
                    logger.info("%s on %s: %s", self.name, server, note)
                break
        return checked

    def pack(self, objects: Any) -> dict[str, NDArray[Any]]:
        """Return the tensors of all inputs as they would be sent, without a server.

        Parameters
        ----------
        objects : ak.Array or dict
            As for `submit`, but not lazy.

        Returns
        -------
        dict
            A tensor for each input of the served model, with all rows in the order of `objects`,
            without objects that are None. `Bucketed` inputs are padded to the length that the
            longest row needs; `submit` sends rows of other lengths in other requests.

        Raises
        ------
        FieldError, InputError
            If the arrays do not fit the layouts.

        Examples
        --------
        >>> import awkward as ak
        >>> import sonic_coffea as sonic
        >>> inputs = {"pf": sonic.Padded("pt", 2), "mask": sonic.Mask()}
        >>> model = sonic.Model("tagger", inputs, {"scores": ["qcd", "top"]})
        >>> sent = model.pack(ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}]))
        >>> {name: tensor.tolist() for name, tensor in sent.items()}
        {'pf': [[[3.0, 2.0]], [[4.0, 0.0]]], 'mask': [[[1.0, 1.0]], [[1.0, 0.0]]]}
        """
        self._check_packed(objects)
        return self.bind(objects).pack_all()

    def _check_packed(self, objects: Any) -> None:
        if has_no_data(objects) or isinstance(objects, Variations):
            raise InputError(
                f"model {self.name!r} packs arrays that are in memory, got "
                f"{type(objects).__name__}; compute lazy ones, and pack variations one by one"
            )
        check_index(objects)

    def export(
        self,
        objects: Any,
        path: str | os.PathLike[str],
        *,
        labels: Mapping[str, Any] | None = None,
        weights: Any = None,
    ) -> None:
        """Write training data: the tensors exactly as they would be sent, to a Parquet file.

        The file has a column for each input, ``N * F * L`` of its own type, and the declaration in
        its metadata, which `check_export` compares after the training. Of `Bucketed` inputs, each
        row has the length to which it is padded. Of inputs that put rows together, such as `Flat`,
        offsets and numbers are those of the row alone.

        Parameters
        ----------
        objects : ak.Array or dict
            As for `pack`.
        path : path
            The ``.parquet`` file.
        labels : mapping, optional
            Names of further columns, each with an array of each object or event, or with a field
            or an expression of the objects: ``{"is_b": "hadronFlavour == 5"}``.
        weights : array or str, optional
            The column ``weight``, in the same way.

        Raises
        ------
        FieldError, InputError
            If the arrays do not fit the layouts, or a label is None.
        ConfigError
            If names clash, a type is one that Parquet lacks, all rows of an event share a request,
            or the file is of another program.
        """
        self._check_packed(objects)
        export(self, objects, path, labels or {}, weights)

    def check_export(self, path: str | os.PathLike[str]) -> None:
        """Compare the inputs with those of a file that `export` has written.

        Raises
        ------
        ContractError
            If they differ: a network that was trained on the file would be given other numbers. The
            message shows each input that differs.
        ConfigError
            If the file is not one that `export` has written.
        """
        check_export(self, path)

    @brief
    def __call__(self, objects: Any, *, timeout_s: float | None = None, **options: Any) -> Any:
        """Score objects and wait for the result; see `submit` for the options.

        Raises
        ------
        DeadlineError
            If `timeout_s` has passed; it includes the wait for the model's contract.
        """
        deadline = Deadline.after(timeout_s)
        call = Submission.of(objects, self, options=options, deadline=deadline)
        return call.send().result_by(deadline)

    @brief
    def submit(
        self,
        objects: Any,
        *,
        pool: Pool | None = None,
        on_error: str = "raise",
        version: Any = None,
        deduplicate: bool = False,
        mask: Any = None,
        default: float | None = None,
    ) -> Pending:
        """Send objects, and return without waiting for their scores.

        The arrays are read while requests leave: do not change them in place before the result is
        there. Otherwise rows are scored as they are by then; with a cache, such a call fails.

        The call waits for the model's contract from a server: the first time, after a pause, and
        while all servers are lost and there is no fallback.

        Parameters
        ----------
        objects : ak.Array, dict or Variations
            ``events * jets * {fields}``, in any nesting, or a dict with an array for each input.
            A dask-awkward array is not sent: the result is a dask-awkward array, which is scored
            when it is computed. With `Variations`, the result is a dict of arrays; lazy variations
            are scored separately.
        pool : Pool, optional
            The pool that sends them; by default, the pool of this process.
        on_error : {"raise", "mask"}
            For rows that no server scored after all retries: ``"raise"`` raises an exception,
            ``"mask"`` puts None in their places, logs a warning and counts them in the statistics.
            An error in the arrays, the declaration or the access is always raised, and so is that
            of a model which is missing when the call begins.
        version : int, str or array, optional
            The version that scores the objects, if the model is declared without one; or an array
            with the version for each event or object, such as one that was not trained on the
            event. Of `Variations`, an array for all, or a dict with an array for each.
        deduplicate : bool
            Whether rows that are equal in all inputs are sent once.
        mask : array of bool, optional
            Which objects are scored: ``events * jets * bool``, or ``events * bool``. What it leaves
            out is not read and not sent. Of `Variations`, one for all, or a dict with one for each.
        default : float, optional
            The score, in each label, of objects that the mask leaves out; by default, None.

        Returns
        -------
        Pending
            Its ``result()`` returns the structure of `objects`, with a record in the place of each
            object: ``events * jets * {qcd: float32, top: float32}``. It is None where the object
            is None, and where no server scored it, whatever the default.

        Raises
        ------
        FieldError, InputError
            If the arrays do not fit the layouts.
        ContractError
            If the server's model does not fit the declaration.
        """
        how: dict[str, Any] = {"pool": pool, "on_error": on_error, "version": version}
        how |= {"deduplicate": deduplicate, "mask": mask, "default": default}
        return Submission((self,), objects, **how).send()
