"""Translation of Responses requests into chat-completions bodies.

It checks the fields that it reads; the others are checked later, as part of the chat body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast

from bottega.openai_api.errors import ApiError
from bottega.openai_api.fields import JSON_NAMES, require, wrong_type
from bottega.openai_api.request import Body

MODES = ("auto", "required")
CHOICES = ("none", *MODES)
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
SCHEMA_FIELDS = ("type", "name", "description", "schema", "strict")
Kind = TypeVar("Kind")


def chat_tools(tools: object) -> list[Body]:
    return [
        {"type": "function", "function": _without_type(tool)} for tool in parse_functions(tools)
    ]


def parse_functions(tools: object) -> list[Body]:
    """Return the supported fields of each function. Raises `ApiError` for tools that run on
    OpenAI's servers."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        wrong_type("tools", "an array of objects", tools)
    return [_function(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def chat_tool_choice(choice: object) -> object:
    if choice is None or choice in CHOICES:
        return choice
    if not isinstance(choice, dict):
        wrong_type("tool_choice", f"an object or one of {', '.join(CHOICES)}", choice)
    match choice.get("type"):
        case "function":
            return _named(choice, "tool_choice")
        case "allowed_tools":
            mode, tools = choice.get("mode"), choice.get("tools")
            if mode not in MODES:
                wrong_type("tool_choice.mode", f"one of {', '.join(MODES)}", mode)
            if not isinstance(tools, list):
                wrong_type("tool_choice.tools", "an array of objects", tools)
            chosen = [_named(one, f"tool_choice.tools[{i}]") for i, one in enumerate(tools)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
    return _not_a_function(choice.get("type"), "tool_choice.type")


def echoed_tool_choice(choice: object) -> object:
    chat = chat_tool_choice(choice)
    if not isinstance(chat, dict):
        return chat or "auto"
    if chat["type"] == "function":
        return {"type": "function", **chat["function"]}
    allowed = chat["allowed_tools"]
    tools = [{"type": "function", **one["function"]} for one in allowed["tools"]]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": tools}


def chat_format(shape: object) -> Body | None:
    response_format = echoed_format(shape)
    if response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return response_format
    return {"type": "json_schema", "json_schema": _without_type(response_format)}


def echoed_format(shape: object) -> Body:
    if shape is None:
        return {"type": "text"}
    if not isinstance(shape, dict):
        wrong_type("text.format", "an object", shape)
    match shape.get("type"):
        case "text" | "json_object" as plain:
            return {"type": plain}
        case "json_schema":
            required_text(shape, "name", "text.format")
            if not isinstance(shape.get("schema"), dict):
                wrong_type("text.format.schema", "an object", shape.get("schema"))
            optional(shape, "description", str, "text.format")
            optional(shape, "strict", bool, "text.format")
            return {name: shape[name] for name in SCHEMA_FIELDS if shape.get(name) is not None}
    expected = "one of text, json_object, json_schema"
    return wrong_type("text.format.type", expected, shape.get("type"))


def _function(tool: object, where: str) -> Body:
    if not isinstance(tool, dict):
        wrong_type(where, "an object", tool)
    require(tool, "type", where)
    if tool["type"] != "function":
        _not_a_function(tool["type"], f"{where}.type")
    required_text(tool, "name", where)
    optional(tool, "description", str, where)
    optional(tool, "parameters", dict, where)
    optional(tool, "strict", bool, where)
    fields = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
    return {"type": "function", **fields}


def _named(choice: object, where: str) -> Body:
    if not isinstance(choice, dict):
        wrong_type(where, "an object", choice)
    if choice.get("type") != "function":
        _not_a_function(choice.get("type"), f"{where}.type")
    return {"type": "function", "function": {"name": required_text(choice, "name", where)}}


def required_text(found: Body, name: str, where: str) -> str:
    require(found, name, where)
    value = found[name]
    if not isinstance(value, str):
        wrong_type(f"{where}.{name}", "a string", value)
    return value


def optional(found: Body, name: str, kind: type[Kind], where: str = "") -> Kind | None:
    value = found.get(name)
    if value is not None and not isinstance(value, kind):
        wrong_type(f"{where}.{name}" if where else name, JSON_NAMES[kind], value)
    return value


def unsupported(message: str, param: str, hint: str) -> ApiError:
    return ApiError(message, code="unsupported_parameter", param=param, hint=hint)


def named(kind: object) -> str:
    """Return the name of a type field for an error. A deeply nested value has no repr."""
    return repr(kind[:64]) if isinstance(kind, str) else JSON_NAMES[type(kind)]


def _without_type(fields: Body) -> Body:
    return {name: value for name, value in fields.items() if name != "type"}


def _not_a_function(kind: object, param: str) -> NoReturn:
    hint = "tools are of type function, and your program runs them"
    raise unsupported(f"a tool of type {named(kind)} is not supported", param, hint)


WHOLE = "responses are not stored: send the whole conversation as input"
ROLES = ("user", "assistant", "system", "developer")
TEXT_FIELDS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}


class Conversation:
    """Chat messages of a Responses input. `origins` are the paths of the contents of the messages
    in the request."""

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self.origins: list[str] = []

    def read(self, given: object) -> None:
        """Add the messages of an input. Raises `ApiError` for an invalid input, and for items that
        chat completions do not support."""
        if isinstance(given, str):
            self.add("user", given, "input")
            return
        if not isinstance(given, list):
            wrong_type("input", "a string or an array of objects", given)
        for number, item in enumerate(given):
            where = f"input[{number}]"
            if not isinstance(item, dict):
                wrong_type(where, "an object", item)
            self._read_item(item, where)

    def add(self, role: str, content: object, origin: str, **more: object) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.origins.append(origin)

    def _read_item(self, item: Body, where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                content = _content(item, "content", where)
                self.add(_role(item, where), content, f"{where}.content")
            case "function_call":
                self._call(_call(item, where), where)
            case "function_call_output":
                call_id = required_text(item, "call_id", where)
                output = _content(item, "output", where)
                self.add("tool", output, f"{where}.output", tool_call_id=call_id)
            case "reasoning":
                pass  # chat completions have no field for earlier reasoning
            case "item_reference" | None:
                raise unsupported("an item has only an id", where, WHOLE)
            case _:
                message = f"an item of type {named(kind)} is not supported"
                hint = "use message, function_call, function_call_output or reasoning"
                raise unsupported(message, f"{where}.type", hint)

    def _call(self, call: Body, origin: str) -> None:
        """Add a call to the assistant's turn that precedes it."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", None, origin)
        cast(list[Body], self.messages[-1].setdefault("tool_calls", [])).append(call)


def _role(item: Body, where: str) -> str:
    role = item.get("role")
    if role not in ROLES:
        expected = f"expected one of {', '.join(ROLES)}"
        raise ApiError(f"Invalid '{where}.role': {expected}.", param=f"{where}.role")
    return role


def _call(item: Body, where: str) -> Body:
    function = {name: required_text(item, name, where) for name in ("name", "arguments")}
    return {"id": required_text(item, "call_id", where), "type": "function", "function": function}


def _content(item: Body, name: str, where: str) -> str | list[Body]:
    require(item, name, where)
    content = item[name]
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        wrong_type(f"{where}.{name}", "a string or an array of objects", content)
    parts = [_part(part, f"{where}.{name}[{i}]") for i, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return cast(str, parts[0]["text"])  # some servers accept lists from users only
    return parts


def _part(part: object, where: str) -> Body:
    if not isinstance(part, dict):
        wrong_type(where, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in TEXT_FIELDS:
        return {"type": "text", "text": required_text(part, TEXT_FIELDS[kind], where)}
    if kind == "input_image":
        return _image(part, where)
    if kind == "input_file":
        hint = "send its text as input_text, or its pages as input_image"
        raise unsupported("files are not supported", where, hint)
    require(part, "type", where)
    hint = "use input_text, input_image, output_text or refusal"
    message = f"a part of type {named(kind)} is not supported"
    raise unsupported(message, f"{where}.type", hint)


def _image(part: Body, where: str) -> Body:
    if part.get("file_id"):
        hint = "send the image as image_url, a data URL (data:image/png;base64,...)"
        raise unsupported("files are not stored", f"{where}.file_id", hint)
    image = {"url": required_text(part, "image_url", where)}
    detail = optional(part, "detail", str, where)
    # Clients of the Responses API always send "auto", the default of chat completions.
    return {
        "type": "image_url",
        "image_url": image if detail in (None, "auto") else image | {"detail": detail},
    }


CHAT = "use POST /v1/chat/completions, which supports it"
# Fields of the Responses API that the gateway does not support, with a hint.
MISSING: Mapping[str, str] = {
    "background": "remove it and wait for the answer, or read it as a stream",
    "context_management": "remove it and shorten the input yourself",
    "conversation": WHOLE,
    "moderation": "remove it",
    "previous_response_id": WHOLE,
    "prompt": "prompts are not stored: send their text as instructions and input",
    "top_logprobs": CHAT,
}
# Fields of chat completions that have another name or no meaning in the Responses API.
CHAT_ONLY: Mapping[str, str] = {
    "audio": CHAT,
    "function_call": "use tool_choice",
    "functions": "use tools",
    "logprobs": CHAT,
    "max_completion_tokens": "use max_output_tokens",
    "max_tokens": "use max_output_tokens",
    "messages": "use input",
    "modalities": CHAT,
    "n": CHAT,
    "reasoning_effort": "use reasoning.effort",
    "response_format": "use text.format",
    "verbosity": "use text.verbosity",
}
# Fields that are translated, rejected or ignored. All other fields are copied.
NOT_COPIED = {
    *MISSING,
    *CHAT_ONLY,
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "store",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "truncation",
}


@dataclass(frozen=True)
class ChatTranslation:
    """Chat body of a Responses request. `origins` are the paths of the contents of the messages in
    the request."""

    body: Body
    origins: Sequence[str]


def translate(given: Body) -> ChatTranslation:
    """Translate a Responses request. Raises `ApiError` for fields without an equivalent."""
    for name, hint in (*MISSING.items(), *CHAT_ONLY.items()):
        if given.get(name):
            raise unsupported(f"'{name}' is not supported", name, hint)
    _check_included(given.get("include"))
    conversation = Conversation()
    if instructions := optional(given, "instructions", str):
        conversation.add("system", instructions, "instructions")
    require(given, "input", "")
    conversation.read(given["input"])
    body: dict[str, object] = {
        name: value for name, value in given.items() if value is not None and name not in NOT_COPIED
    }
    body |= {"messages": conversation.messages, **_settings(given)}
    choice, parallel = given.get("tool_choice"), optional(given, "parallel_tool_calls", bool)
    tools = {
        "tools": chat_tools(given.get("tools")),
        "tool_choice": chat_tool_choice(choice),
        "parallel_tool_calls": parallel,
    }
    if tools["tools"]:  # servers reject the other two without tools
        body |= {name: value for name, value in tools.items() if value is not None}
    if given.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    return ChatTranslation(body, conversation.origins)


def _check_included(include: object) -> None:
    if include is None:
        return
    if not isinstance(include, list) or not all(isinstance(one, str) for one in include):
        wrong_type("include", "an array of strings", include)
    # Other values concern unsupported tools or features of OpenAI's servers.
    if "message.output_text.logprobs" in include:
        raise unsupported("log probabilities are not supported", "include", CHAT)


def _settings(given: Body) -> dict[str, object]:
    reasoning = optional(given, "reasoning", dict) or {}
    text = optional(given, "text", dict) or {}
    settings = {
        "max_completion_tokens": given.get("max_output_tokens"),
        "reasoning_effort": reasoning.get("effort"),
        "verbosity": text.get("verbosity"),
        "response_format": chat_format(text.get("format")),
    }
    _check_metadata(optional(given, "metadata", dict) or {})
    return {name: value for name, value in settings.items() if value is not None}


def _check_metadata(metadata: Mapping[object, object]) -> None:
    for name, value in metadata.items():
        if not isinstance(value, str):
            wrong_type(f"metadata.{str(name)[:64]}", "a string", value)
