"""Help screens without Python types, and commands that are imported when they run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, cast, get_args

import typer
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
    """Command whose help screen shows no Python types, and no line breaks in a paragraph."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(one.split()) for one in paragraphs)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class HelpGroup(TyperGroup):
    """Group of commands whose help screen shows no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def command_group(help: str) -> typer.Typer:
    """Return a group of commands that shows its help if no command is named."""
    group = typer.Typer(cls=HelpGroup, add_completion=False, no_args_is_help=True, help=help)
    group.callback()(_no_action)  # without one, a single command would take the group's place
    return group


def _no_action() -> None:
    pass


class LazyCommand(TyperCommand):
    """Command whose module is imported when it runs, or for its help screen and completions.

    `target` is the module in `bottega.cli` and its function or `Typer` application.
    """

    def __init__(self, name: str, target: str, **settings: Any) -> None:
        super().__init__(name, **settings)
        self._target = target
        self._command: TyperCommand | TyperGroup | None = None

    def load(self) -> TyperCommand | TyperGroup:
        """Import the module and return the command itself, with its parameters."""
        if self._command is None:
            module, _, attribute = self._target.partition(".")
            target = getattr(import_module(f"bottega.cli.{module}"), attribute)
            if not isinstance(target, typer.Typer):
                function, target = target, typer.Typer(add_completion=False)
                target.command(self.name, cls=HelpCommand)(function)
            self._command = cast("TyperCommand | TyperGroup", typer.main.get_command(target))
        return self._command

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command itself; typer continues with `context.command`."""
        return self.load().make_context(info_name, args, parent, **extra)
