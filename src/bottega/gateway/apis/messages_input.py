"""Translation of requests of Anthropic's Messages API into chat-completions bodies.

It checks the fields that it reads; the others are checked later, as part of the chat body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bottega._util.identity import json_digest
from bottega.gateway.apis.translation import (
    encode_body,
    optional_field,
    text_field,
    type_name,
    typed,
    unsupported,
)
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import Body, require

ROLES = ("user", "assistant", "system")
BLOCKS = "a string or an array of objects"
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A chat body has no field for earlier reasoning, which clients send back unchanged.
IGNORED_BLOCKS = ("thinking", "redacted_thinking")
# Fields that the gateway does not support, with a hint.
UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "container": "remove it",
    "context_management": "remove it and shorten the messages yourself",
    "mcp_servers": "call the servers in your program, and send their results as tool_result",
}
MAX_USER = 64  # of a chat body; clients of this API send longer ids
# Fields with the same name and meaning in a chat body.
COPIED = ("model", "stream", "temperature", "top_p", "top_k")


@dataclass(frozen=True)
class MessagesTranslation:
    """Chat body of a Messages request. `origins` are the paths of the contents of its messages in
    the request."""

    body: Body
    origins: Sequence[str]


def translate(given: Body) -> MessagesTranslation:
    """Translate a Messages request. Raises `ApiError` for fields without an equivalent."""
    for name, hint in UNSUPPORTED_FIELDS.items():
        if given.get(name):
            raise unsupported(f"'{name}' is not supported", name, hint)
    # Other types let the model decide how long it thinks.
    if (optional_field(given, "thinking", dict) or {}).get("type") == "enabled":
        hint = "remove it, or set output_config.effort"
        raise unsupported("a budget for thinking is not supported", "thinking", hint)
    conversation = _Conversation()
    if system := given.get("system"):
        conversation.add("system", _texts(system, "system"), "system")
    require(given, "messages", "")
    for number, message in enumerate(typed(given["messages"], list, "messages")):
        where = f"messages[{number}]"
        conversation.read(typed(message, dict, where), where)
    require(given, "max_tokens", "")
    body: dict[str, object] = {name: given.get(name) for name in COPIED}
    body |= {
        "messages": conversation.messages,
        "max_completion_tokens": given["max_tokens"],
        "stop": given.get("stop_sequences") or None,
        "user": _user((optional_field(given, "metadata", dict) or {}).get("user_id")),
        **_output(optional_field(given, "output_config", dict) or {}),
        **_tools(given),
    }
    if given.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    body = {name: value for name, value in body.items() if value is not None}
    return MessagesTranslation(body, conversation.origins)


def translate_prompt(given: Body) -> MessagesTranslation:
    """Translate a request to count its tokens, which has no `max_tokens`."""
    return translate({"max_tokens": 1, **given})


def _user(id: object) -> object:
    """Return the id of a user, as a digest of 64 characters if it is longer than a chat body's."""
    return json_digest(id) if isinstance(id, str) and len(id) > MAX_USER else id


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[Body] = []
        self.origins: list[str] = []

    def add(self, role: str, content: object, origin: str, **more: object) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.origins.append(origin)

    def read(self, message: Body, where: str) -> None:
        """Add a turn, which may become several chat messages."""
        role = message.get("role")
        if role not in ROLES:
            expected = f"expected one of {', '.join(ROLES)}"
            raise ApiError(f"Invalid '{where}.role': {expected}.", param=f"{where}.role")
        require(message, "content", where)
        where = f"{where}.content"
        content = message["content"]
        if isinstance(content, str) or role == "system":
            self.add(role, _texts(content, where), where)
            return
        blocks = [
            (typed(block, dict, f"{where}[{number}]"), f"{where}[{number}]")
            for number, block in enumerate(typed(content, list, where, BLOCKS))
        ]
        read = self._read_user if role == "user" else self._read_assistant
        read([one for one in blocks if one[0].get("type") not in IGNORED_BLOCKS], where)

    def _read_user(self, blocks: Sequence[tuple[Body, str]], where: str) -> None:
        """Add the results of tools, then the other blocks as one message."""
        parts: list[Body] = []
        for block, at in blocks:
            if block.get("type") == "tool_result":
                self._add_result(block, at, parts)
            else:
                parts.append(_part(block, at))
        if parts or not blocks:
            self.add("user", _joined(parts), where)

    def _add_result(self, block: Body, where: str, parts: list[Body]) -> None:
        """Add the text of a result. Its images go to `parts`: chat completions accept only texts
        from tools."""
        content = block.get("content") or ""
        if not isinstance(content, str):
            listed = enumerate(typed(content, list, f"{where}.content", BLOCKS))
            found = [_part(typed(one, dict, f"{where}.content[{n}]"), where) for n, one in listed]
            parts += [one for one in found if one["type"] != "text"]
            content = "\n".join(str(one["text"]) for one in found if one["type"] == "text")
        if block.get("is_error") is True:
            content = f"Error: {content}"
        self.add("tool", content, where, tool_call_id=text_field(block, "tool_use_id", where))

    def _read_assistant(self, blocks: Sequence[tuple[Body, str]], where: str) -> None:
        texts: list[str] = []
        calls: list[Body] = []
        for block, at in blocks:
            match block.get("type"):
                case "text":
                    texts.append(text_field(block, "text", at))
                case "tool_use":
                    calls.append(_call(block, at))
                case _:
                    raise _unknown_block(block, at, "text or tool_use")
        more = {"tool_calls": calls} if calls else {}
        self.add("assistant", "".join(texts) or (None if calls else ""), where, **more)


def _part(block: Body, where: str) -> Body:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": text_field(block, "text", where)}
        case "image":
            require(block, "source", where)
            source = typed(block["source"], dict, f"{where}.source")
            return {"type": "image_url", "image_url": {"url": _url(source, f"{where}.source")}}
    raise _unknown_block(block, where, "text, image or tool_result")


def _url(source: Body, where: str) -> str:
    match source.get("type"):
        case "base64":
            kind = text_field(source, "media_type", where)
            return f"data:{kind};base64,{text_field(source, 'data', where)}"
        case "url":
            return text_field(source, "url", where)
    hint = "use base64 or url"
    message = f"a source of type {type_name(source.get('type'))} is not supported"
    raise unsupported(message, f"{where}.type", hint)


def _unknown_block(block: Body, where: str, known: str) -> ApiError:
    require(block, "type", where)
    message = f"a block of type {type_name(block['type'])} is not supported here"
    return unsupported(message, f"{where}.type", f"use {known}")


def _joined(parts: list[Body]) -> str | list[Body]:
    """Return a single text as a string, since some servers accept only that."""
    if not parts:
        return ""
    return str(parts[0]["text"]) if [one["type"] for one in parts] == ["text"] else parts


def _texts(given: object, where: str) -> str:
    """Return the text of a string or of text blocks."""
    if isinstance(given, str):
        return given
    blocks = enumerate(typed(given, list, where, BLOCKS))
    return "\n\n".join(
        text_field(typed(block, dict, f"{where}[{n}]"), "text", f"{where}[{n}]")
        for n, block in blocks
    )


def _call(block: Body, where: str) -> Body:
    require(block, "input", where)
    arguments = encode_body(typed(block["input"], dict, f"{where}.input")).decode()
    return {
        "id": text_field(block, "id", where),
        "type": "function",
        "function": {"name": text_field(block, "name", where), "arguments": arguments},
    }


def _output(config: Body) -> dict[str, object]:
    fields: dict[str, object] = {"reasoning_effort": config.get("effort")}
    if wanted := optional_field(config, "format", dict, "output_config"):
        where = "output_config.format"
        if wanted.get("type") != "json_schema":
            message = f"a format of type {type_name(wanted.get('type'))} is not supported"
            raise unsupported(message, f"{where}.type", "use json_schema")
        require(wanted, "schema", where)
        schema = typed(wanted["schema"], dict, f"{where}.schema")
        named = {"name": "output", "schema": schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields


def _tools(given: Body) -> dict[str, object]:
    """Return the fields for tools of a chat body, none without tools."""
    tools = [
        _function(typed(tool, dict, f"tools[{n}]"), f"tools[{n}]")
        for n, tool in enumerate(optional_field(given, "tools", list) or [])
    ]
    if not tools:  # servers reject a choice without tools
        return {}
    choice = optional_field(given, "tool_choice", dict) or {"type": "auto"}
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    return {"tools": tools, "tool_choice": _tool_choice(choice), "parallel_tool_calls": parallel}


def _function(tool: Body, where: str) -> Body:
    if tool.get("type") not in (None, "custom"):
        message = f"a tool of type {type_name(tool['type'])} is not supported"
        raise unsupported(message, f"{where}.type", "use type custom: your program runs the tool")
    function: dict[str, object] = {"name": text_field(tool, "name", where)}
    if description := optional_field(tool, "description", str, where):
        function["description"] = description
    function["parameters"] = optional_field(tool, "input_schema", dict, where) or {}
    return {"type": "function", "function": function}


def _tool_choice(choice: Body) -> object:
    kind = choice.get("type")
    if kind == "tool":
        name = text_field(choice, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}
    if isinstance(kind, str) and kind in TOOL_CHOICES:
        return TOOL_CHOICES[kind]
    message = f"a tool_choice of type {type_name(kind)} is not supported"
    raise unsupported(message, "tool_choice.type", "use auto, any, tool or none")
