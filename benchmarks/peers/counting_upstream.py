"""Model endpoint that counts requests and their cost, to check several gateways.

Bare ASGI: python -m uvicorn benchmarks.peers.counting_upstream:app

The reply is a function of the last message, so a wrong reply is visible. `GET /counts` returns the
calls and dollars by model. A message that begins with `wait SECONDS` is answered after that time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PROMPT_TOKENS, COMPLETION_TOKENS = 100, 100
calls: Counter[str] = Counter()


def expected_reply(question: str) -> str:
    return f"reply {hashlib.sha256(question.encode()).hexdigest()[:16]}"


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while True:
            event = (await receive())["type"]
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return
    raw, more = b"", True
    while more:
        message = await receive()
        raw, more = raw + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/counts":
        await _send(send, {"calls": calls})
        return
    if scope["path"] != "/v1/chat/completions":
        await _send(send, {"object": "list", "data": []})
        return
    body = json.loads(raw)
    calls[body["model"]] += 1
    content = body["messages"][-1]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    if text.startswith("wait "):
        await asyncio.sleep(float(text.split()[1]))
    await _send(send, _completion(body["model"], expected_reply(text)))


def _completion(model: str, text: str) -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": COMPLETION_TOKENS,
            "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
        },
    }


async def _send(send: Send, document: object) -> None:
    payload = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(payload))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
