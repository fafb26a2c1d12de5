"""Asking the operating system about processes, and making and trying models."""

from __future__ import annotations

from pathlib import Path

import psutil

from sonic_coffea.server import Served, local_servers
from sonic_coffea.transport import read_model_config


def function(path, code, *, width=2, **options):
    """Write a file of Python; serve its function of that name, of rows `x` to rows `y`."""
    path.write_text(code)
    rows = ("float32", ["N", width])
    declared = {"inputs": {"x": rows}, "outputs": {"y": rows}, **options}
    return Served(f"{path}:{path.stem}", **declared)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def family(pid: int) -> list[int]:
    """The process and everything below it."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def supervisor(server) -> int:
    """The process that ends a server when its owner is gone."""
    return psutil.Process(server.pid).ppid()


def socket_folder(url: str) -> Path:
    return Path(url.removeprefix("unix:")).parent


def shared_memory(url: str) -> list[str]:
    """What a server has in shared memory, or has left there."""
    name = f"sonic-coffea-{socket_folder(url).name}"
    return sorted(path.name for path in Path("/dev/shm").glob(f"{name}*"))  # noqa: S108


def is_listed(url: str) -> bool:
    """Whether the processes of this user find a server."""
    return url in [record["url"] for record in local_servers()]


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses that a process listens on; gRPC writes IPv4 ones as mapped into IPv6."""
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def files(root):
    """The content of each file below a folder."""
    return {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def configuration(repository, model="m"):
    return read_model_config((repository / model / "config.pbtxt").read_text())


def infer(server, model: str, version: str = "", **inputs):
    """Send arrays to a model as they are and return its outputs by name."""
    import tritonclient.grpc as grpc_client
    from tritonclient.utils import np_to_triton_dtype

    tensors = []
    for name, array in inputs.items():
        tensor = grpc_client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array))
    client = grpc_client.InferenceServerClient(server.url)
    try:
        answer = client.infer(model, tensors, model_version=version)
        return {t.name: answer.as_numpy(t.name) for t in answer.get_response().outputs}
    finally:
        client.close()
