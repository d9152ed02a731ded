"""The root of the command line: the list of commands, each imported when it is called and not before.

The folders name their commands in the entry-point group ``protwin.commands``, so this one imports none of them.
``protwin --help`` shows every command without importing its module; a command whose extra is not installed is listed
as well, and says when called what to install.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from ..basics.disk_space import is_full
from ..basics.errors import ProtwinError, shortened
from ..basics.gc_pause import gc_paused
from .exits import discard_output, report_interruption, report_mistake

COMMANDS: Final[dict[str, str]] = {
    "hardware": "List and show known machines, or probe this one.",
    "models": "List the models of the catalogue.",
    "trace": "Trace a model into a workload file.",
    "calibrate": "Measure this machine and fit the simulator to it.",
    "search": "Find the fastest plan that fits a model on a machine.",
    "advise": "Rank machines for a model, by time and by cost per token.",
    "simulate": "Predict time and memory of one plan.",
    "run": "Train by a plan for some iterations and record what happened.",
    "compare": "Lay two records side by side, a prediction and a measurement above all.",
}
"""What each command does, in the order of a user's work; shown by ``protwin --help`` without importing anything."""

RUNTIME_MODULES: Final = frozenset({"psutil", "torch", "transformers"})
"""Top-level modules that the extra ``runtime`` brings."""


def root_command() -> TyperGroup:
    """The root command, ready to be called with ``prog_name``."""
    app = typer.Typer(
        cls=_RootGroup,
        help="Find out how to train a model that does not fit, then train it that way.",
        epilog="Every command explains itself: protwin search --help",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.callback()(_root_options)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def _root_options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"protwin {version('protwin')}")
        raise typer.Exit


def missing_runtime(missing: str, command: str) -> ProtwinError:
    """What to tell a user who calls ``command`` without the extra that it needs."""
    return ProtwinError(
        f"protwin {command} needs {missing}, which is not installed. "
        "Install the runtime: pip install 'protwin[runtime]'"
    )


_UsageError: Final = cast(type[Exception], typer.BadParameter.__base__)
"""What typer raises for a command line that makes no sense; it exports no name of it."""


class _RootGroup(TyperGroup):
    """Holds the commands of the entry-point group and turns errors into messages."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        found = {entry.name: entry for entry in entry_points(group="protwin.commands")}
        names = [name for name in COMMANDS if name in found] + sorted(found.keys() - COMMANDS.keys())
        self.commands = {name: _LazyCommand(found[name]) for name in names}

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except KeyboardInterrupt as error:
            raise typer.Exit(report_interruption()) from error
        except _UsageError as error:
            raise _shortened(error) from error.__cause__

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except ProtwinError as error:
            raise typer.Exit(report_mistake(str(error))) from error
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in RUNTIME_MODULES:
                raise
            mistake = missing_runtime(missing, ctx.invoked_subcommand or "")
            raise typer.Exit(report_mistake(str(mistake))) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(report_interruption()) from error
        except _UsageError as error:
            raise _shortened(error) from error.__cause__
        except BrokenPipeError as error:
            raise typer.Exit(discard_output()) from error
        except OSError as error:
            if error.filename is not None:
                # A path that the system refuses to look at: too long a name, a folder that nobody may enter.
                told = shortened(f"{error.filename} cannot be used: {error.strerror}.")
                raise typer.Exit(report_mistake(told)) from error
            if not is_full(error):
                raise
            # Whatever files a command writes are told by name; what remains is standard output.
            discard_output()
            told = f"standard output takes no more: {error.strerror}. Free some space, or write elsewhere."
            raise typer.Exit(report_mistake(told)) from error
        except ValueError as error:
            raise typer.Exit(report_mistake(_as_mistake(error))) from error


def _shortened(error: Exception) -> Exception:
    """A complaint about the command line, with whatever it quotes cut short."""
    error.message = shortened(getattr(error, "message", ""))  # type: ignore[attr-defined]
    return error


def _as_mistake(error: ValueError) -> str:
    """The message of a pydantic validation error; any other ValueError is no mistake of the user and goes on."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        raise error
    from ..basics.documents import describe

    return f"{error.title} is inconsistent: {describe(error)}"


class _LazyCommand(TyperCommand):
    """Stands for a command in the list; becomes the command itself when it is called."""

    def __init__(self, entry: EntryPoint) -> None:
        summary = COMMANDS.get(entry.name, "")
        super().__init__(entry.name, help=summary, short_help=summary, rich_markup_mode=None)
        self._entry = entry

    def load(self) -> typer.Typer:
        """Import the command's module; gives its app."""
        with gc_paused():
            app = self._entry.load()
        assert isinstance(app, typer.Typer), f"{self._entry.value} is no typer app"
        return app

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = typer.main.get_command(self.load())
        return command.make_context(info_name, args, parent=parent, **extra)
