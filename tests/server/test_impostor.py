"""Whoever takes the port of a local server that has ended gets neither its secret nor rows."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import awkward as ak
import grpc
import onnx
import pytest
from onnx import TensorProto, helper
from tests.ports import held_port
from tests.waiting import until
from tritonclient.grpc import service_pb2, service_pb2_grpc

import sonic_coffea as sonic
from sonic_coffea.errors import ServerLostError
from sonic_coffea.transport import connect_transport, local_state

ROWS = ak.Array([[{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}], [{"a": 5.0, "b": 6.0}]])
ECHO = sonic.Model("echo", {"x": sonic.Row(["a", "b"])}, {"y": ["a", "b"]})
REFUSED = r"the local server has ended \(process \d+\); .* is sent neither its secret nor rows"
NOBODY = 65534


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))


def described(request, context):
    answer = service_pb2.ModelMetadataResponse(name="echo", versions=["1"])
    answer.inputs.add(name="x", datatype="FP32", shape=[-1, 2])
    answer.outputs.add(name="y", datatype="FP32", shape=[-1, 2])
    return answer


def scored(request, context):
    (x,) = request.raw_input_contents
    answer = service_pb2.ModelInferResponse(model_name="echo", model_version="1")
    answer.outputs.add(name="y", datatype="FP32", shape=[len(x) // 8, 2])
    answer.raw_output_contents.append(bytes(len(x)))
    return answer


ANSWERS = {
    "ServerLive": lambda *_: service_pb2.ServerLiveResponse(live=True),
    "ServerReady": lambda *_: service_pb2.ServerReadyResponse(ready=True),
    "ModelMetadata": described,
    "ModelInfer": scored,
}


class Impostor(grpc.GenericRpcHandler):
    """A server that takes down what it gets, and gives every row the scores that it likes."""

    def __init__(self):
        self.calls = []

    def service(self, details):
        name = details.method.rpartition("/")[2]
        self.calls.append((name, tuple(details.invocation_metadata)))
        request = getattr(service_pb2, f"{name}Request")
        return grpc.unary_unary_rpc_method_handler(
            ANSWERS.get(name, lambda *_: getattr(service_pb2, f"{name}Response")()),
            request_deserializer=request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )


@contextlib.contextmanager
def impostor_at(port, *, shares_port=True):
    """Yield an impostor of this same user: others cannot even listen, as tests below show."""
    impostor = Impostor()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", int(shares_port))])
    server.add_generic_rpc_handlers((impostor,))
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    server.start()
    try:
        # It does deceive those who connect without looking.
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), wait_for_ready=True).live
        channel.close()
        impostor.calls.clear()
        yield impostor
    finally:
        server.stop(None).wait()


def crash(server):
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.running, what="the end of the server")


def test_one_who_was_connected(light, serve):
    with serve(light) as server, sonic.connect(server.url, retry_timeout_s=2.0) as pool:
        assert ECHO(ROWS, pool=pool).a.tolist() == [[1, 3], [5]]
        crash(server)
        with impostor_at(server.port) as impostor:
            with pytest.raises(ServerLostError, match=REFUSED):
                ECHO(ROWS, pool=pool)
            assert impostor.calls == []


def test_one_who_connects_later(light, serve):
    with serve(light) as server:
        crash(server)
        with impostor_at(server.port) as impostor:
            connection = connect_transport(server.url)
            with pytest.raises(ServerLostError, match=REFUSED) as caught:
                connection.contract("echo", None)
            connection.close()
            assert impostor.calls == []
        # What the error advises, where another server is meant to be there.
        path = local_state.record_path(server.url)
        assert f"remove {path}" in str(caught.value)
        path.unlink()
        with impostor_at(server.port) as other:
            connection = connect_transport(server.url)
            assert connection.contract("echo", None).version == "1"
            connection.close()
            assert other.calls


def test_a_server_that_is_started_again_is_used_again(light, serve):
    with serve(light) as server, sonic.connect(server.url, retry_timeout_s=60.0) as pool:
        assert ECHO(ROWS, pool=pool).a.tolist() == [[1, 3], [5]]
        crash(server)
        pending = ECHO.submit(ROWS, pool=pool)
        server.start()
        assert pending.result(timeout_s=60.0).a.tolist() == [[1, 3], [5]]


def test_the_server_of_a_process_that_was_killed(tmp_path):
    """A server without a Triton is a part of its process."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 2]) for n in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "echo", [x], [y])
    network = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(network, str(tmp_path / "echo.onnx"))
    sonic.build_repository(tmp_path / "repository", {"echo": tmp_path / "echo.onnx"})
    code = (
        "import sys; from sonic_coffea.server import InProcessServer;"
        "print(InProcessServer(sys.argv[1]).start().url, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "repository")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        url = process.stdout.readline().decode().strip()
        with sonic.connect(url, retry_timeout_s=2.0) as pool:
            assert ECHO(ROWS, pool=pool).a.tolist() == [[1, 3], [5]]
            process.kill()
            process.wait()
            with impostor_at(int(url.rpartition(":")[2])) as impostor:
                with pytest.raises(ServerLostError, match=REFUSED):
                    ECHO(ROWS, pool=pool)
                assert impostor.calls == []


LISTENER = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
listener = socket.socket()
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    listener.setsockopt(socket.SOL_SOCKET, option, 1)
try:
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen()
except OSError as error:
    print(error.strerror, flush=True)
    sys.exit()
print("listens", flush=True)
listener.settimeout(0.2)
while True:
    try:
        listener.accept()[0].close()
        print("somebody came", flush=True)
    except TimeoutError:
        pass
"""


@contextlib.contextmanager
def another_user_at(port):
    command = [sys.executable, "-c", LISTENER, str(port), str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = [process.stdout.readline().strip()]
        yield said
        process.kill()
        said.extend(process.stdout.read().splitlines())


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@as_root
def test_another_user_cannot_listen_while_a_client_is_there(light, serve):
    with serve(light) as server:
        connection = connect_transport(server.url)
        assert connection.ready()
        port = server.port
        crash(server)
    # The owner holds its port no more.
    with another_user_at(port) as said:
        assert said == ["Address already in use"]
    connection.close()
    with another_user_at(port) as said:
        assert said == ["listens"]


@as_root
def test_another_user_who_was_faster(light, serve):
    with serve(light) as server:
        crash(server)
        record, url = local_state.find(server.url), server.url
    local_state.register(record)
    with another_user_at(int(url.rpartition(":")[2])) as said:
        assert said == ["listens"]
        connection = connect_transport(url)
        with pytest.raises(ServerLostError, match=r"has ended .* another user, who has port \d+"):
            connection.info()
        # A server that still runs, but has lost its port, is not asked there either.
        alive = {"pid": os.getpid(), "start_ticks": local_state.process_start_ticks(os.getpid())}
        local_state.register(type(record)(**{**vars_of(record), **alive}))
        with pytest.raises(ServerLostError, match=r"lost port \d+; another user"):
            connection.info()
        connection.close()
    assert said == ["listens"]


def vars_of(record):
    return {name: getattr(record, name) for name in record.__slots__}


def test_a_server_that_does_not_share_its_port():
    """As older versions of this package start them: nothing can hold it beside them."""
    with held_port() as port, impostor_at(port, shares_port=False) as server:
        local_state.register(
            local_state.ServerRecord(
                url=f"grpc://127.0.0.1:{port}",
                pid=os.getpid(),
                start_ticks=local_state.process_start_ticks(os.getpid()),
                header="sonic-secret",
                secret="hush",
                repository="",
            )
        )
        connection = connect_transport(f"grpc://127.0.0.1:{port}")
        assert connection.ready()
        connection.close()
        ((_, metadata),) = server.calls
        assert ("sonic-secret", "hush") in metadata


def test_localhost_is_where_the_server_listens(light, serve):
    with serve(light) as server, socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", server.port))
        other.listen()
        other.settimeout(0)
        connection = connect_transport(server.url.replace("127.0.0.1", "localhost"))
        assert all(connection.ready() for _ in range(4))
        connection.close()
        with pytest.raises(BlockingIOError):
            other.accept()
