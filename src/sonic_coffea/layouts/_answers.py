"""The tensors of an answer, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonic_coffea.errors import ResponseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sonic_coffea.layouts._scatter import Tensor


def tensor_of(name: str, answer: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of an output; an answer without it is an error."""
    if name not in answer:
        raise ResponseError(
            f"the answer lacks output {name!r}; it has {', '.join(answer) or 'none'}"
        )
    return answer[name]


def misshapen(name: str, tensor: Tensor, expected: str) -> ResponseError:
    """Return the error for a tensor of another shape than expected."""
    return ResponseError(f"output {name!r} came back with shape {list(tensor.shape)} {expected}")


def check_kind(name: str, before: Tensor, now: Tensor) -> None:
    """Raise if an answer is of another kind than an earlier one."""
    if before.shape[1:] != now.shape[1:] or before.dtype != now.dtype:
        raise ResponseError(
            f"output {name!r} came back as {now.dtype} {list(now.shape[1:])} a row, "
            f"before as {before.dtype} {list(before.shape[1:])}"
        )
