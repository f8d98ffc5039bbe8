"""Logistic regression behind an OpenAI-compatible endpoint, the master of the text streams.

    python -m benchmarks.text_master lm/questions-1 lm/questions-2 --without lm/questions-0

It is trained on MiniLM vectors of the texts of the given task folders that are in no file of the
folder `--without`, and answers with the label of the last user turn's first line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from sklearn.linear_model import LogisticRegression

from bottega.evaluation.methods.retriever_factory import open_embedder
from bottega.types import Query

NAME = "classifier"


class Classifier:
    """Labels of texts; one request at a time."""

    def __init__(self, texts: Sequence[str], labels: Sequence[str]) -> None:
        self._embed = open_embedder("minilm")
        self._model = LogisticRegression(C=10.0, max_iter=1000)
        self._model.fit(self._embed.embed([Query(text) for text in texts]), labels)
        self._lock = Lock()

    def __call__(self, text: str) -> str:
        with self._lock:
            return str(self._model.predict(self._embed.embed([Query(text)]))[0])


def rows(folders: Iterable[Path], *names: str) -> dict[str, str]:
    """Return the labels of the texts in these files of task folders."""
    lines = [line for f in folders for name in names for line in (f / name).open(encoding="utf-8")]
    return {row["question"]: row["labels"][0] for row in map(json.loads, lines)}


def handler(classify: Classifier) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = last_text(body["messages"])
            message = {"role": "assistant", "content": f"Answer: {classify(text)}"}
            reply = {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": NAME,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


def last_text(messages: Sequence[dict[str, object]]) -> str:
    """Return the first line of the last turn."""
    content = messages[-1]["content"]
    if isinstance(content, list):
        content = next(part["text"] for part in content if part["type"] == "text")
    return str(content).strip().splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--without", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8766)
    chosen = parser.parse_args()
    evaluated = rows([chosen.without], "train.jsonl", "test.jsonl")
    trained = rows(chosen.folders, "train.jsonl")
    texts = [text for text in trained if text not in evaluated]
    classify = Classifier(texts, [trained[text] for text in texts])
    server = ThreadingHTTPServer(("127.0.0.1", chosen.port), handler(classify))
    print(
        f"trained on {len(texts)} texts; export OPENAI_BASE_URL=http://127.0.0.1:{chosen.port}/v1"
    )
    server.serve_forever()


if __name__ == "__main__":
    main()
