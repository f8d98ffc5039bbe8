"""Help screens: placeholders in place of Python types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _without_types(params: list[Any]) -> list[Any]:
    """Return the parameters with a placeholder for each value. Flags have no value, and the name
    of an argument is its placeholder."""
    for param in params:
        if isinstance(param, TyperArgument):
            param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
        elif isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
        elif isinstance(param, TyperOption) and param.metavar is None:
            kind = param.type_descriptor.annotation
            param.metavar = PLACEHOLDERS.get(next(iter(get_args(kind)), kind))
    return params


class HelpCommand(TyperCommand):
    """Command whose help screen shows no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class HelpGroup(TyperGroup):
    """Group of commands whose help screen shows no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))
