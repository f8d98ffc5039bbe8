"""Clients of `soak.py --mixed`: they use each endpoint and note what the gateway acknowledges."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp

from benchmarks.soak_clients import (
    EXPECTED,
    STUCK,
    Question,
    TenantKey,
    image,
    lines,
    plain_reply,
    streamed_reply,
)
from tests.gateway.marked_replies import is_start

Body = dict[str, Any]
PRICES = {"apprentice": (1.0, 2.0), "master": (10.0, 20.0)}
"""US dollars per million tokens."""
QUESTIONS, REPEATED, IMAGES = 1_500, 4, 400
RARE_NAMESPACES = 120
"""More than have labels of their own in the metrics, and than may be open."""
FILLING = 8
"""Times of filling the caches that are hard to fill, for each client."""
CORRECTIONS = 15
REFUSED = "Refuse this: "
"""Start of questions whose fields the upstream refuses."""
SAMPLING = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("min_p", "repetition_penalty", "typical_p"),
)
PAUSE = 0.6
"""Mean seconds between two actions of a client."""
BATCH_LINES = 5
LOGINS = 5
BATCH_ENDPOINTS = (*("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings"),)
PAGES = (
    *("overview?period=24h", "overview?period=30d", "requests", "requests?text=case%2077"),
    *("requests?state=failed", "playground", "keys", "evaluations"),
    *("cache?namespace={0}", "cache?namespace={0}&text=case", "knowledge?namespace={0}"),
    *("knowledge/map?namespace={0}", "knowledge/duplicates?namespace={0}"),
    "knowledge/wrong-labels?namespace={0}",
    *("evaluations/run?run=animals", "evaluations/items?run=animals"),
    *("evaluations/item?run=animals&index=7", "evaluations/report?run=animals"),
)
ACTIONS = {
    "chat": 16,
    "stream": 12,
    "leave": 5,
    "image_url": 6,
    "repeat": 8,
    "rare_namespace": 3,
    "refused_fields": 3,
    "responses": 8,
    "messages": 8,
    "completions": 6,
    "embeddings": 5,
    "feedback": 5,
    "batch": 1,
    "console": 7,
    "models": 2,
    "metrics": 1,
    "invalid": 2,
}


@dataclass
class Acknowledged:
    """What the gateway acknowledged, and what went wrong."""

    requests: dict[str, float | None] = field(default_factory=dict)
    """Cost in US dollars by request id, None if the client does not know it."""
    feedback: dict[str, float] = field(default_factory=dict)
    corrections: list[tuple[str, str]] = field(default_factory=list)
    """Namespaces and ids of demonstrations."""
    responses: dict[str, list[str]] = field(default_factory=dict)
    """Ids of stored responses by key, without deleted ones."""
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def is_wrong(self, why: str, *more: object) -> None:
        self.wrong.append(f"{why}: {' | '.join(map(str, more))}"[:600])


class RefusedError(Exception):
    """The gateway refused the request with a status that its upstream's failures explain."""


@dataclass
class MixedClient:
    """Client that uses all endpoints in random order until it is stopped."""

    url: str
    tenant: TenantKey
    images_url: str
    outcomes: Acknowledged
    rng: random.Random
    numbers: itertools.count[int]
    """Of namespaces, and of questions that are sent once."""
    session: aiohttp.ClientSession
    _cookie: str = ""
    _last: str = ""

    async def run(self, until: asyncio.Event) -> None:
        for name in ("rare_namespace", "refused_fields", "analyses") * FILLING:
            await self._act(name)
        while not until.is_set():
            [name] = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))
            await self._act(name)
            await asyncio.sleep(self.rng.expovariate(1 / PAUSE))

    async def _act(self, name: str) -> None:
        action: Callable[[], Awaitable[None]] = getattr(self, name)
        try:
            async with asyncio.timeout(STUCK):
                await action()
            self.outcomes.done[name] += 1
        except RefusedError as error:
            self.outcomes.refused[f"{name} {error}"] += 1
        except TimeoutError:
            self.outcomes.is_wrong("no reply in time", name)
        except (aiohttp.ClientError, ConnectionError, KeyError, ValueError) as problem:
            self.outcomes.is_wrong(f"{name} failed", repr(problem))

    async def chat(self) -> None:
        await self._chat(self._question(), {"temperature": self.rng.choice([0, 0.5])})

    async def stream(self) -> None:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        await self._chat(self._question(), more)

    async def repeat(self) -> None:
        question = Question(self.rng.randrange(REPEATED), None)
        await self._chat(question, {"temperature": 0}, headers={})

    async def rare_namespace(self) -> None:
        namespace = f"{self.tenant.namespace}/{next(self.numbers) % RARE_NAMESPACES}"
        await self._chat(self._question(), {}, {"x-bottega-namespace": namespace})

    async def image_url(self) -> None:
        number = self.rng.randrange(IMAGES)
        question = Question(self.rng.randrange(QUESTIONS), number)
        url = {"url": f"{self.images_url}/{number}.png"}
        text = {"type": "text", "text": question.text}
        turn = {"role": "user", "content": [{"type": "image_url", "image_url": url}, text]}
        await self._chat(question, {"messages": [turn]})

    async def refused_fields(self) -> None:
        """Send fields that the apprentice refuses: the master answers."""
        question = f"{REFUSED}{self.rng.random()}"
        body = self._body(question, {name: self.rng.random() for name in SAMPLING})
        async with self._post("/v1/chat/completions", body, {"x-bottega-master-rate": "0"}):
            pass

    async def analyses(self) -> None:
        """Open pages of the console that cache what they compute."""
        namespace = f"{self.tenant.namespace}/{next(self.numbers) % RARE_NAMESPACES}"
        await self._open(f"knowledge/map?namespace={namespace}")

    async def leave(self) -> None:
        """Leave in mid-stream."""
        body = self._body(self._question().turn["content"], {"stream": True})
        async with self._post("/v1/chat/completions", body, {}) as response:
            async for _ in response.content.iter_any():
                break
            response.close()

    async def responses(self) -> None:
        question, other = self._question(), self._question()
        first = await self._response(question, {"store": True})
        if first is None:
            return
        second = await self._response(other, {"store": True, "previous_response_id": first})
        if second is not None and self.rng.random() < 0.3:
            self.outcomes.responses[self.tenant.key].remove(second)
            path = f"/v1/responses/{second}"
            await self._read("DELETE", path)
            await self._expect(404, "GET", path)

    async def _response(self, question: Question, more: Body) -> str | None:
        """Return the id if the response is stored."""
        streamed = self.rng.random() < 0.3
        parts: list[Body] = [{"type": "input_text", "text": question.text}]
        if question.image is not None:
            parts.insert(0, {"type": "input_image", "image_url": image(question.image).data_url})
        body = {"model": "bottega", "stream": streamed, "max_output_tokens": 100}
        body |= {"input": [{"role": "user", "content": parts}], **more}
        async with self._post("/v1/responses", body, {}) as response:
            if streamed:
                ends = ("response.completed", "response.incomplete", "response.failed")
                event = await self._last_event(response, ends)
                found = event.get("response", {})
            else:
                found = json.loads(await response.read())
            text = "".join(
                part["text"]
                for item in found.get("output", [])
                for part in item.get("content", [])
                if part.get("type") == "output_text"
            )
            failed = found.get("status") == "failed"
            self._took(response, question, text, None if failed else found.get("usage"))
        if failed or not found.get("store"):
            return None
        self.outcomes.responses.setdefault(self.tenant.key, []).append(found["id"])
        return str(found["id"])

    async def messages(self) -> None:
        question, streamed = self._question(), self.rng.random() < 0.3
        parts: list[Body] = [{"type": "text", "text": question.text}]
        if question.image is not None:
            _, _, data = image(question.image).data_url.partition(",")
            source = {"type": "base64", "media_type": "image/png", "data": data}
            parts.insert(0, {"type": "image", "source": source})
        body = {"model": "bottega", "max_tokens": 100, "stream": streamed}
        body["messages"] = [{"role": "user", "content": parts}]
        async with self._post("/v1/messages", body, {}) as response:
            if streamed:
                await self._last_event(response, ("message_stop", "error"))
                return
            found = json.loads(await response.read())
            text = "".join(part.get("text", "") for part in found["content"])
            self._took(response, question, text, found["usage"])

    async def completions(self) -> None:
        question = Question(self.rng.randrange(QUESTIONS), None)
        body = {"model": "bottega", "prompt": question.text, "max_tokens": 100}
        async with self._post("/v1/completions", body, {}) as response:
            found = json.loads(await response.read())
            self._took(response, question, found["choices"][0]["text"], found["usage"])

    async def embeddings(self) -> None:
        numbers = [self.rng.randrange(IMAGES) for _ in range(3)]
        parts = [{"type": "image_url", "image_url": {"url": image(n).data_url}} for n in numbers]
        body = {"model": "bottega/embedder", "input": [[part] for part in parts]}
        async with self._post("/v1/embeddings", body, {}) as response:
            vectors = [one["embedding"] for one in json.loads(await response.read())["data"]]
            if len(vectors) != len(parts) or len({len(one) for one in vectors}) != 1:
                self.outcomes.is_wrong("embeddings of other inputs", vectors)

    async def feedback(self) -> None:
        number = next(self.numbers)
        question = Question(number, number % IMAGES)
        id = await self._chat(question, {})
        rating = self.rng.randrange(11) / 10
        given: Body = {"request_id": id, "rating": rating, "comment": "soaked"}
        if is_correction := self.rng.random() < 0.5:
            given |= {"correction": f"Corrected {id}", "messages": [question.turn]}
        async with self._post("/v1/feedback", given, {}, refused={403}, counted=False) as response:
            found = json.loads(await response.read())
        self.outcomes.feedback[id] = rating
        if is_correction:
            self.outcomes.corrections.append((self.tenant.namespace, found["example"]))

    async def batch(self) -> None:
        endpoint = self.rng.choice(BATCH_ENDPOINTS)
        ids = [f"line-{number}" for number in range(BATCH_LINES)]
        rows = [
            {"custom_id": id, "method": "POST", "url": endpoint, "body": self._line(endpoint)}
            for id in ids
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, rows)).encode(), filename="soak.jsonl")
        file = await self._read("POST", "/v1/files", data=form)
        given = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = await self._read("POST", "/v1/batches", json=given)
        path = f"/v1/batches/{batch['id']}"
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.5)
            batch = await self._read("GET", path)
        found = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                content = await self._content(f"/v1/files/{batch[name]}/content")
                found += [json.loads(line) for line in content.splitlines()]
                await self._read("DELETE", f"/v1/files/{batch[name]}")
        if sorted(line["custom_id"] for line in found) != ids or batch["status"] != "completed":
            self.outcomes.is_wrong("a batch without all its lines", batch, found)
        for line in found:
            status = line["response"]["status_code"]
            self.outcomes.batches["lines" if status == 200 else f"lines with {status}"] += 1
            if status == 200:
                self.outcomes.requests[line["response"]["request_id"]] = None
        await self._read("DELETE", f"/v1/files/{file['id']}")
        await self._expect(404, "GET", f"/v1/files/{file['id']}")

    def _line(self, endpoint: str) -> Body:
        question = Question(self.rng.randrange(QUESTIONS), self.rng.randrange(IMAGES))
        if endpoint == "/v1/embeddings":
            return {"model": "bottega/embedder", "input": [question.turn["content"]]}
        body: Body = {"model": "bottega", "max_tokens": 100}
        if endpoint == "/v1/responses":
            del body["max_tokens"]
            return body | {"input": question.text, "store": False}
        if endpoint == "/v1/completions":
            return body | {"prompt": question.text}
        return body | {"messages": [question.turn]}

    async def console(self) -> None:
        pages = [page.format(self.tenant.namespace) for page in PAGES]
        if self._last:
            pages.append(f"requests/{self._last}")
        await self._open(self.rng.choice(pages))

    async def _open(self, page: str) -> None:
        if not self._cookie or self.rng.random() < 0.05:
            await self._log_in()
        status, text = await self._page(page)
        for _ in range(LOGINS):
            if status != 303:
                break
            # Another client of this key has logged out, which ends all sessions of the key.
            self._cookie = ""
            await self._log_in()
            status, text = await self._page(page)
        if status != 200 or "</html>" not in text:
            self.outcomes.is_wrong("console page", page, status, text)

    async def _page(self, page: str) -> tuple[int, str]:
        url, headers = f"{self.url}/ui/{page}", {"cookie": self._cookie}
        async with self.session.get(url, headers=headers, allow_redirects=False) as response:
            return response.status, await response.text()

    async def _log_in(self) -> None:
        headers = {"origin": self.url, "content-type": "application/x-www-form-urlencoded"}
        if self._cookie:
            sent = headers | {"cookie": self._cookie}
            url = f"{self.url}/ui/logout"
            async with self.session.post(url, headers=sent, allow_redirects=False):
                pass
        url, form = f"{self.url}/ui/login", urlencode({"key": self.tenant.key})
        async with self.session.post(
            url, data=form, headers=headers, allow_redirects=False
        ) as response:
            [(name, morsel)] = response.cookies.items()
            self._cookie = f"{name}={morsel.value}"

    async def models(self) -> None:
        await self._read("GET", "/v1/models")

    async def metrics(self) -> None:
        text = await self._content("/metrics")
        if b"\nbottega_ledger_rows_lost 0.0" not in text:
            self.outcomes.is_wrong("the ledger lost rows", text)

    async def invalid(self) -> None:
        body = self._body(self._question().turn["content"], {})
        sent: tuple[int, Body] = self.rng.choice(
            [
                (404, body | {"model": f"unknown-{self.rng.random()}"}),
                (400, body | {"messages": "hello"}),
                (400, body | {f"field_{self.rng.random()}": 1}),
            ]
        )
        async with self._post("/v1/chat/completions", sent[1], {}, refused={sent[0]}):
            self.outcomes.is_wrong("an invalid request was answered", sent)

    def _question(self) -> Question:
        number = self.rng.randrange(QUESTIONS)
        return Question(number, None if number % 5 == 0 else number * 7 % IMAGES)

    def _body(self, content: object, more: Mapping[str, object]) -> Body:
        turn = {"role": "user", "content": content}
        return {"model": "bottega", "max_tokens": 100, "messages": [turn], **more}

    async def _chat(
        self,
        question: Question,
        more: Mapping[str, object],
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Return the request's id."""
        if headers is None:
            headers = {"x-bottega-master-rate": f"{self.rng.random():.4f}"}
        body = self._body(question.turn["content"], more)
        async with self._post("/v1/chat/completions", body, headers) as response:
            streamed = body.get("stream")
            reply = await (streamed_reply if streamed else plain_reply)(response)
            if not reply.whole and not reply.failed:
                self.outcomes.is_wrong("a stream without an end", question, reply)
            usage = reply.usage if reply.whole and not reply.failed else None
            return self._took(response, question, reply.text, usage)

    def _took(
        self,
        response: aiohttp.ClientResponse,
        question: Question,
        text: str,
        usage: Mapping[str, int] | None,
    ) -> str:
        """Check the text, and note the cost of the reply. Return the request's id."""
        headers, id = response.headers, response.headers["x-request-id"]
        if not is_start(text, question.digest) and not text.startswith("Corrected "):
            self.outcomes.is_wrong("not an answer to this question", question, text)
        if usage is not None:
            into, out = PRICES[headers["x-bottega-route"]]
            read = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            made = usage.get("completion_tokens", usage.get("output_tokens", 0))
            is_replay = headers["x-bottega-cache"] == "replayed"
            self.outcomes.requests[id] = 0.0 if is_replay else (read * into + made * out) / 1e6
            self.outcomes.done["replayed"] += is_replay
            shown = headers.get("x-bottega-demonstrations", "0") != "0"
            self.outcomes.done["shown examples"] += shown
        self._last = id
        return id

    @asynccontextmanager
    async def _post(
        self,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        *,
        refused: set[int] = frozenset(),  # type: ignore[assignment]
        counted: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a reply with status 200, which acknowledges the request if it is `counted` in the
        ledger. Raises `RefusedError` if it has an expected error."""
        sent = {**headers, **self._key}
        async with self.session.post(f"{self.url}{path}", json=body, headers=sent) as response:
            if response.status != 200:
                text = await response.text()
                if response.status not in EXPECTED | refused or '"error"' not in text:
                    self.outcomes.is_wrong("an unexpected error", path, response.status, text)
                raise RefusedError(response.status)
            if counted:
                self.outcomes.requests[response.headers["x-request-id"]] = None
            yield response

    async def _last_event(
        self, response: aiohttp.ClientResponse, ends: tuple[str, ...]
    ) -> Mapping[str, Any]:
        """Read a stream of events, of which one of type `ends` must be the end."""
        last: Mapping[str, Any] = {}
        async for line in lines(response):
            if line.startswith("data: ") and (event := json.loads(line[6:]))["type"] in ends:
                last = event
        if not last:
            self.outcomes.is_wrong("a stream without an end", response.url)
        return last

    @property
    def _key(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tenant.key}"}

    async def _content(self, path: str) -> bytes:
        url = f"{self.url}{path}"
        async with self.session.get(url, headers=self._key) as response:
            if response.status != 200:
                self.outcomes.is_wrong("not readable", path, response.status)
            return await response.read()

    async def _read(self, method: str, path: str, **sent: Any) -> Any:
        url = f"{self.url}{path}"
        async with self.session.request(method, url, headers=self._key, **sent) as response:
            text = await response.text()
            if response.status in EXPECTED:
                raise RefusedError(response.status)
            if response.status != 200:
                self.outcomes.is_wrong(f"{method} failed", path, response.status, text)
            return json.loads(text)

    async def _expect(self, status: int, method: str, path: str) -> None:
        url = f"{self.url}{path}"
        async with self.session.request(method, url, headers=self._key) as response:
            if response.status != status:
                self.outcomes.is_wrong(f"expected status {status}", path, response.status)
