from __future__ import annotations

import asyncio
import json
import socket
from multiprocessing import Pipe
from typing import Any

from bottega.gateway.asgi import Admission
from bottega.gateway.running.process import DrainingServer, uvicorn_config
from bottega.gateway.running.workers import DRAIN, STOP, WorkerServer


async def test_admission_counts_rejects_and_finishes() -> None:
    release = asyncio.Event()
    sent_headers: list[tuple[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/slow":
            await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def come(path: str) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await admission({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
        sent_headers[:] = sent[0]["headers"]
        return sent[0]["status"], sent[-1].get("body", b"")

    admission = Admission(app, 2)
    slow = [asyncio.create_task(come("/v1/slow")) for _ in range(2)]
    await asyncio.sleep(0)
    status, body = await come("/v1/quick")
    assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
    _, body = await come("/v1/messages")
    assert json.loads(body)["error"]["type"] == "overloaded_error"  # in Anthropic's format
    assert (await come("/metrics"))[0] == 200
    admission.closing, admission.limit = True, 3
    finishing = asyncio.create_task(admission.finish(60))
    await asyncio.sleep(0.01)
    assert not finishing.done()
    assert (await come("/v1/quick"))[0] == 200  # on an open connection
    assert sent_headers == [(b"connection", b"close")]
    assert not finishing.done()
    assert (await come("/readyz"))[0] == 503
    assert (await come("/healthz"))[0] == 200
    release.set()
    await asyncio.wait_for(finishing, 30)
    assert [(await task)[0] for task in slow] == [200, 200]
    await asyncio.wait_for(admission.finish(60), 30)


class HangingApp:
    """ASGI application whose requests wait for `release`."""

    def __init__(self) -> None:
        self.begun, self.release = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        self.begun.set()
        await self.release.wait()
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"ok"})


async def test_replies_in_progress_end_their_connections_while_draining() -> None:
    app, started = HangingApp(), asyncio.Event()
    admission = Admission(app, 1)
    listener = socket.create_server(("127.0.0.1", 0))
    server = DrainingServer(uvicorn_config(admission), admission, 5.0, started.set)
    serving = asyncio.create_task(server.serve([listener]))
    await started.wait()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await app.begun.wait()
    server.drain()
    await asyncio.sleep(0.01)
    app.release.set()
    # A further request on this connection might otherwise be cut off by the end of the process.
    reply = await asyncio.wait_for(reader.read(), 30)
    assert b"connection: close" in reply and reply.endswith(b"ok")
    writer.close()
    await serving


async def test_a_worker_that_drains_stops_at_once_when_told_to() -> None:
    app, started = HangingApp(), asyncio.Event()
    admission = Admission(app, 1)
    listener = socket.create_server(("127.0.0.1", 0))
    supervisor, channel = Pipe()
    server = WorkerServer(
        uvicorn_config(admission),
        admission,
        1e9,
        started.set,
        channel=channel,
        apply=lambda config: None,
    )
    serving = asyncio.create_task(server.serve([listener]))
    await started.wait()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await app.begun.wait()
    supervisor.send(DRAIN)
    done, _ = await asyncio.wait([serving], timeout=0.5)
    assert not done
    supervisor.send(STOP)
    await asyncio.wait_for(serving, 60)
    assert admission.closing and not app.release.is_set()
    asyncio.get_running_loop().remove_reader(channel.fileno())
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # the process would end here
    assert await reader.read() == b""
    for one in (writer, supervisor, channel):
        one.close()
