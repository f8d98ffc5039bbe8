"""Translation of Responses requests into chat-completions bodies.

It checks the fields that it reads; the others are checked later, as part of the chat body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from bottega.gateway.apis.translation import (
    optional_field,
    text_field,
    type_name,
    typed,
    unsupported,
)
from bottega.openai_api.errors import ApiError, wrong_type
from bottega.openai_api.request import Body, require

MODES = ("auto", "required")
CHOICES = ("none", *MODES)
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
SCHEMA_FIELDS = ("type", "name", "description", "schema", "strict")
OBJECTS = "an array of objects"
WHOLE = "send the whole conversation as input"
ROLES = ("user", "assistant", "system", "developer")
TEXT_FIELDS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
CHAT = "use POST /v1/chat/completions, which supports it"
# Fields of the Responses API that the gateway does not support, with a hint.
UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "background": "remove it and wait for the answer, or read it as a stream",
    "context_management": "remove it and shorten the input yourself",
    "conversation": WHOLE,
    "moderation": "remove it",
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
    *UNSUPPORTED_FIELDS,
    *CHAT_ONLY,
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "store",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "truncation",
}


def _functions(tools: object) -> list[Body]:
    """Return the supported fields of each function. Raises `ApiError` for tools that run on
    OpenAI's servers."""
    functions: list[Body] = []
    given = [] if tools is None else typed(tools, list, "tools", OBJECTS)
    for number, tool in enumerate(given):
        where = f"tools[{number}]"
        require(typed(tool, dict, where), "type", where)
        if tool["type"] != "function":
            _reject_tool(tool["type"], f"{where}.type")
        text_field(tool, "name", where)
        optional_field(tool, "description", str, where)
        optional_field(tool, "parameters", dict, where)
        optional_field(tool, "strict", bool, where)
        fields = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
        functions.append({"type": "function", **fields})
    return functions


def _tool_choice(choice: object) -> object:
    """Return the checked choice, without unknown fields."""
    if choice is None or choice in CHOICES:
        return choice
    given = typed(choice, dict, "tool_choice", f"an object or one of {', '.join(CHOICES)}")
    match given.get("type"):
        case "function":
            return _function_name(given, "tool_choice")
        case "allowed_tools":
            mode, tools = given.get("mode"), given.get("tools")
            if mode not in MODES:
                wrong_type("tool_choice.mode", f"one of {', '.join(MODES)}", mode)
            chosen = enumerate(typed(tools, list, "tool_choice.tools", OBJECTS))
            named = [_function_name(one, f"tool_choice.tools[{i}]") for i, one in chosen]
            return {"type": "allowed_tools", "mode": mode, "tools": named}
    return _reject_tool(given.get("type"), "tool_choice.type")


def _function_name(choice: object, where: str) -> Body:
    given = typed(choice, dict, where)
    if given.get("type") != "function":
        _reject_tool(given.get("type"), f"{where}.type")
    return {"type": "function", "name": text_field(given, "name", where)}


def _chat_tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return _nested(choice, "function")
    tools = [_nested(one, "function") for one in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def _nested(fields: Body, name: str) -> Body:
    """Return an object in the format of chat completions: `fields` below `name`, besides `type`."""
    rest = {key: value for key, value in fields.items() if key != "type"}
    return {"type": fields["type"], name: rest}


def _response_format(given: object) -> Body:
    if given is None:
        return {"type": "text"}
    format_ = typed(given, dict, "text.format")
    match format_.get("type"):
        case "text" | "json_object" as plain:
            return {"type": plain}
        case "json_schema":
            text_field(format_, "name", "text.format")
            typed(format_.get("schema"), dict, "text.format.schema")
            optional_field(format_, "description", str, "text.format")
            optional_field(format_, "strict", bool, "text.format")
            return {name: format_[name] for name in SCHEMA_FIELDS if format_.get(name) is not None}
    expected = "one of text, json_object, json_schema"
    return wrong_type("text.format.type", expected, format_.get("type"))


def _reject_tool(kind: object, param: str) -> NoReturn:
    hint = "tools are of type function, and your program runs them"
    raise unsupported(f"a tool of type {type_name(kind)} is not supported", param, hint)


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
        items = typed(given, list, "input", "a string or an array of objects")
        self.read_items(items)

    def read_earlier(self, items: Sequence[Body]) -> None:
        """Add the messages of stored items."""
        for item in items:
            self._read_item(item, "previous_response_id")

    def read_items(self, items: Sequence[object]) -> None:
        for number, item in enumerate(items):
            where = f"input[{number}]"
            self._read_item(typed(item, dict, where), where)

    def add(self, role: str, content: object, origin: str, **more: object) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.origins.append(origin)

    def _read_item(self, item: Body, where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                content, role = _content(item, "content", where), item.get("role")
                if role not in ROLES:
                    expected = f"expected one of {', '.join(ROLES)}"
                    raise ApiError(f"Invalid '{where}.role': {expected}.", param=f"{where}.role")
                self.add(role, content, f"{where}.content")
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                call_id = text_field(item, "call_id", where)
                output = _content(item, "output", where)
                self.add("tool", output, f"{where}.output", tool_call_id=call_id)
            case "reasoning":
                pass  # chat completions have no field for earlier reasoning
            case "item_reference" | None:
                raise unsupported("an item has only an id", where, WHOLE)
            case _:
                message = f"an item of type {type_name(kind)} is not supported"
                hint = "use message, function_call, function_call_output or reasoning"
                raise unsupported(message, f"{where}.type", hint)

    def _add_call(self, item: Body, where: str) -> None:
        """Add a call to the assistant's turn that precedes it."""
        function = {name: text_field(item, name, where) for name in ("name", "arguments")}
        call = {"id": text_field(item, "call_id", where), "type": "function", "function": function}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", None, where)
        cast(list[Body], self.messages[-1].setdefault("tool_calls", [])).append(call)


def _content(item: Body, name: str, where: str) -> str | list[Body]:
    require(item, name, where)
    content = item[name]
    if isinstance(content, str):
        return content
    where = f"{where}.{name}"
    given = enumerate(typed(content, list, where, "a string or an array of objects"))
    parts = [_part(part, f"{where}[{i}]") for i, part in given]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return cast(str, parts[0]["text"])  # some servers accept lists from users only
    return parts


def _part(given: object, where: str) -> Body:
    part = typed(given, dict, where)
    kind = part.get("type")
    if isinstance(kind, str) and kind in TEXT_FIELDS:
        return {"type": "text", "text": text_field(part, TEXT_FIELDS[kind], where)}
    if kind == "input_image":
        return _image(part, where)
    if kind == "input_file":
        hint = "send its text as input_text, or its pages as input_image"
        raise unsupported("files are not supported", where, hint)
    require(part, "type", where)
    hint = "use input_text, input_image, output_text or refusal"
    message = f"a part of type {type_name(kind)} is not supported"
    raise unsupported(message, f"{where}.type", hint)


def _image(part: Body, where: str) -> Body:
    if part.get("file_id"):
        hint = "send the image as image_url, a data URL (data:image/png;base64,...)"
        raise unsupported("files are not stored", f"{where}.file_id", hint)
    image = {"url": text_field(part, "image_url", where)}
    detail = optional_field(part, "detail", str, where)
    # Clients of the Responses API always send "auto", the default of chat completions.
    return {
        "type": "image_url",
        "image_url": image if detail in (None, "auto") else image | {"detail": detail},
    }


@dataclass(frozen=True)
class ChatTranslation:
    """Chat body of a Responses request. `origins` are the paths of the contents of the messages in
    the request `given`. `tools`, `tool_choice` and `response_format` are its checked fields;
    `is_stored` means that its response is stored."""

    given: Body
    body: Body
    origins: Sequence[str]
    tools: Sequence[Body]
    tool_choice: object
    response_format: Body
    is_stored: bool = False

    @property
    def items(self) -> list[Body]:
        """Return the input as items."""
        text = self.given["input"]
        if isinstance(text, str):
            return [{"type": "message", "role": "user", "content": text}]
        return list(cast(list[Body], text))


def translate(
    given: Body, earlier: Sequence[Body] = (), *, is_stored: bool = False
) -> ChatTranslation:
    """Translate a Responses request that continues the conversation of the `earlier` items. Raises
    `ApiError` for fields without an equivalent."""
    for name, hint in (*UNSUPPORTED_FIELDS.items(), *CHAT_ONLY.items()):
        if given.get(name):
            raise unsupported(f"'{name}' is not supported", name, hint)
    _check_included(given.get("include"))
    conversation = Conversation()
    if instructions := optional_field(given, "instructions", str):
        conversation.add("system", instructions, "instructions")
    conversation.read_earlier(earlier)
    require(given, "input", "")
    conversation.read(given["input"])
    reasoning = optional_field(given, "reasoning", dict) or {}
    text = optional_field(given, "text", dict) or {}
    response_format = _response_format(text.get("format"))
    for name, value in (optional_field(given, "metadata", dict) or {}).items():
        typed(value, str, f"metadata.{str(name)[:64]}")
    choice, parallel = given.get("tool_choice"), optional_field(given, "parallel_tool_calls", bool)
    tools, choice = _functions(given.get("tools")), _tool_choice(choice)
    body = {name: value for name, value in given.items() if name not in NOT_COPIED}
    body |= {
        "messages": conversation.messages,
        "max_completion_tokens": given.get("max_output_tokens"),
        "reasoning_effort": reasoning.get("effort"),
        "verbosity": text.get("verbosity"),
    }
    match response_format["type"]:
        case "json_object":
            body["response_format"] = response_format
        case "json_schema":
            body["response_format"] = _nested(response_format, "json_schema")
    if tools:  # servers reject the other two without tools
        body["tools"] = [_nested(tool, "function") for tool in tools]
        body["tool_choice"] = _chat_tool_choice(choice)
        body["parallel_tool_calls"] = parallel
    if given.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    body = {name: value for name, value in body.items() if value is not None}
    return ChatTranslation(
        given, body, conversation.origins, tools, choice or "auto", response_format, is_stored
    )


def _check_included(include: object) -> None:
    if include is None:
        return
    if not isinstance(include, list) or not all(isinstance(one, str) for one in include):
        wrong_type("include", "an array of strings", include)
    # Other values concern unsupported tools or features of OpenAI's servers.
    if "message.output_text.logprobs" in include:
        raise unsupported("log probabilities are not supported", "include", CHAT)
