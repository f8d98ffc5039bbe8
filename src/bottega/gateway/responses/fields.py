"""Settings that the Responses API and chat completions write differently, and what is told of
them in a reply: nothing that was not understood."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from bottega.gateway.fields import JSON_NAMES, required, wrong_type
from bottega.gateway.ports import Body
from bottega.gateway.refusals import Refusal

MODES = ("auto", "required")
CHOICES = ("none", *MODES)
OF_A_FUNCTION = ("name", "description", "parameters", "strict")
OF_A_SCHEMA = ("type", "name", "description", "schema", "strict")
Kind = TypeVar("Kind")


def chat_tools(tools: object) -> list[Body]:
    return [{"type": "function", "function": _without_type(tool)} for tool in functions_of(tools)]


def functions_of(tools: object) -> list[Body]:
    """What is understood of each. Raises `Refusal` for tools that OpenAI's own servers run."""
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


def told_tool_choice(choice: object) -> object:
    chat = chat_tool_choice(choice)
    if not isinstance(chat, dict):
        return chat or "auto"
    if chat["type"] == "function":
        return {"type": "function", **chat["function"]}
    allowed = chat["allowed_tools"]
    tools = [{"type": "function", **one["function"]} for one in allowed["tools"]]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": tools}


def chat_format(shape: object) -> Body | None:
    told = told_format(shape)
    if told["type"] == "text":
        return None
    if told["type"] == "json_object":
        return told
    return {"type": "json_schema", "json_schema": _without_type(told)}


def told_format(shape: object) -> Body:
    if shape is None:
        return {"type": "text"}
    if not isinstance(shape, dict):
        wrong_type("text.format", "an object", shape)
    match shape.get("type"):
        case "text" | "json_object" as plain:
            return {"type": plain}
        case "json_schema":
            text_of(shape, "name", "text.format")
            if not isinstance(shape.get("schema"), dict):
                wrong_type("text.format.schema", "an object", shape.get("schema"))
            optional(shape, "description", str, "text.format")
            optional(shape, "strict", bool, "text.format")
            return {name: shape[name] for name in OF_A_SCHEMA if shape.get(name) is not None}
    expected = "one of text, json_object, json_schema"
    return wrong_type("text.format.type", expected, shape.get("type"))


def _function(tool: object, where: str) -> Body:
    if not isinstance(tool, dict):
        wrong_type(where, "an object", tool)
    required(tool, "type", where)
    if tool["type"] != "function":
        _not_a_function(tool["type"], f"{where}.type")
    text_of(tool, "name", where)
    optional(tool, "description", str, where)
    optional(tool, "parameters", dict, where)
    optional(tool, "strict", bool, where)
    told = {name: tool[name] for name in OF_A_FUNCTION if tool.get(name) is not None}
    return {"type": "function", **told}


def _named(choice: object, where: str) -> Body:
    if not isinstance(choice, dict):
        wrong_type(where, "an object", choice)
    if choice.get("type") != "function":
        _not_a_function(choice.get("type"), f"{where}.type")
    return {"type": "function", "function": {"name": text_of(choice, "name", where)}}


def text_of(found: Body, name: str, where: str) -> str:
    required(found, name, where)
    value = found[name]
    if not isinstance(value, str):
        wrong_type(f"{where}.{name}", "a string", value)
    return value


def optional(found: Body, name: str, kind: type[Kind], where: str = "") -> Kind | None:
    value = found.get(name)
    if value is not None and not isinstance(value, kind):
        wrong_type(f"{where}.{name}" if where else name, JSON_NAMES[kind], value)
    return value


def unsupported(message: str, param: str, hint: str) -> Refusal:
    return Refusal(message, code="unsupported_parameter", param=param, hint=hint)


def named(kind: object) -> str:
    """Of whatever a client wrote as a type: brackets without end have no repr."""
    return repr(kind[:64]) if isinstance(kind, str) else JSON_NAMES[type(kind)]


def _without_type(told: Body) -> Body:
    return {name: value for name, value in told.items() if name != "type"}


def _not_a_function(kind: object, param: str) -> NoReturn:
    hint = "tools are of type function, and your program runs them"
    raise unsupported(f"a tool of type {named(kind)} is not supported here", param, hint)
