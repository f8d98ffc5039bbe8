"""The input of a Responses request as the messages of a chat."""

from __future__ import annotations

from typing import cast

from bottega.gateway.fields import required, wrong_type
from bottega.gateway.ports import Body
from bottega.gateway.refusals import Refusal
from bottega.gateway.responses.fields import named, optional, text_of, unsupported

WHOLE = "nothing is kept between requests: send the whole conversation as input"
ROLES = ("user", "assistant", "system", "developer")
SPOKEN = {"input_text": "text", "output_text": "text", "refusal": "refusal"}


class Conversation:
    """`origins` tell where the content of each message stood in the request."""

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self.origins: list[str] = []

    def read(self, given: object) -> None:
        """Raises `Refusal` for what is no input, and for what a chat cannot hold."""
        if isinstance(given, str):
            self.say("user", given, "input")
            return
        if not isinstance(given, list):
            wrong_type("input", "a string or an array of objects", given)
        for number, item in enumerate(given):
            where = f"input[{number}]"
            if not isinstance(item, dict):
                wrong_type(where, "an object", item)
            self._read_item(item, where)

    def say(self, role: str, content: object, origin: str, **more: object) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.origins.append(origin)

    def _read_item(self, item: Body, where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                said = _content(item, "content", where)
                self.say(_role(item, where), said, f"{where}.content")
            case "function_call":
                self._call(_call(item, where), where)
            case "function_call_output":
                answered = text_of(item, "call_id", where)
                output = _content(item, "output", where)
                self.say("tool", output, f"{where}.output", tool_call_id=answered)
            case "reasoning":
                pass  # chat completions have no place for what a model thought before
            case "item_reference" | None:
                raise unsupported("an item is named by its id only", where, WHOLE)
            case _:
                said = f"an item of type {named(kind)} is not supported here"
                hint = "items are message, function_call, function_call_output and reasoning"
                raise unsupported(said, f"{where}.type", hint)

    def _call(self, call: Body, origin: str) -> None:
        """Calls and the words before them are one turn of the assistant."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.say("assistant", None, origin)
        cast(list[Body], self.messages[-1].setdefault("tool_calls", [])).append(call)


def _role(item: Body, where: str) -> str:
    role = item.get("role")
    if role not in ROLES:
        expected = f"expected one of {', '.join(ROLES)}"
        raise Refusal(f"Invalid '{where}.role': {expected}.", param=f"{where}.role")
    return role


def _call(item: Body, where: str) -> Body:
    function = {name: text_of(item, name, where) for name in ("name", "arguments")}
    return {"id": text_of(item, "call_id", where), "type": "function", "function": function}


def _content(item: Body, name: str, where: str) -> str | list[Body]:
    required(item, name, where)
    content = item[name]
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        wrong_type(f"{where}.{name}", "a string or an array of objects", content)
    parts = [_part(part, f"{where}.{name}[{i}]") for i, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return cast(str, parts[0]["text"])  # some servers take lists from users only
    return parts


def _part(part: object, where: str) -> Body:
    if not isinstance(part, dict):
        wrong_type(where, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in SPOKEN:
        return {"type": "text", "text": text_of(part, SPOKEN[kind], where)}
    if kind == "input_image":
        return _image(part, where)
    if kind == "input_file":
        hint = "send its text as input_text, or its pages as input_image"
        raise unsupported("files are not supported here", where, hint)
    required(part, "type", where)
    hint = "parts are input_text, input_image, output_text and refusal"
    said = f"a part of type {named(kind)} is not supported here"
    raise unsupported(said, f"{where}.type", hint)


def _image(part: Body, where: str) -> Body:
    if part.get("file_id"):
        hint = "send the image as image_url, a data URL (data:image/png;base64,...)"
        raise unsupported("files are not kept here", f"{where}.file_id", hint)
    image = {"url": text_of(part, "image_url", where)}
    detail = optional(part, "detail", str, where)
    # Clients of the Responses API always say it; it is what chat completions assume.
    return {
        "type": "image_url",
        "image_url": image if detail in (None, "auto") else image | {"detail": detail},
    }
