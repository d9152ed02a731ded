"""The root of the command line: the list of commands, each imported when it is called and not before.

A command is known by the place of its app, so this folder imports none of the others.  ``protwin --help`` shows every
command without importing its module; a command whose extra is not installed is listed as well, and says when called
what to install.  Other packages add theirs in the entry-point group ``protwin.commands``, which is read when a name is
not one of ours: looking through all installed packages takes longer than many an answer.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from ..basics.disk_space import is_full
from ..basics.errors import ProtwinError, shortened
from ..basics.gc_pause import gc_paused
from ..basics.plain_text import plain
from .blas import one_blas_thread
from .exits import discard_output, report_interruption, report_mistake
from .streams import say
from .told import warnings_apart

COMMANDS: Final[dict[str, str]] = {
    "hardware": "List and show known machines, or probe this one.",
    "models": "List the models of the catalogue.",
    "trace": "Trace a model into a workload file.",
    "calibrate": "Measure this machine and fit the simulator to it.",
    "validate": "Judge predictions by random plans, predicted and measured.",
    "search": "Find the fastest plan that fits a model on a machine.",
    "sweep": "Search plans over batch sizes and sequence lengths, and where offloading becomes free.",
    "advise": "Rank machines for a model, by time and by cost per token.",
    "largest": "Find the largest model that trains on a machine.",
    "simulate": "Predict time and memory of one plan.",
    "run": "Train by a plan for some iterations and record what happened.",
    "explain-config": "Say what another tool's file asks for, takes, and what a plan would do.",
    "bypass": "Distil a student of a teacher, block by block.",
    "checkpoint": "Inspect, consolidate and reshard checkpoints.",
    "published": "Show predictions beside training runs that others measured.",
    "compare": "Lay two records side by side, a prediction and a measurement above all.",
}
"""What each command does, in the order of a user's work; shown by ``protwin --help`` without importing anything."""

APPS: Final[dict[str, str]] = {
    "hardware": "protwin.sim.commands.hardware:hardware",
    "models": "protwin.sim.commands.hardware:models",
    "trace": "protwin.runtime.commands.trace:trace",
    "calibrate": "protwin.calibration.commands.calibrate:calibrate",
    "validate": "protwin.calibration.commands.validate:validate",
    "search": "protwin.sim.commands.search:search",
    "sweep": "protwin.sim.commands.sweep:sweep",
    "advise": "protwin.sim.commands.advise:advise",
    "largest": "protwin.calibration.commands.largest:largest",
    "simulate": "protwin.sim.commands.simulate:simulate",
    "run": "protwin.calibration.commands.run:run",
    "explain-config": "protwin.calibration.commands.explain_config:explain_config",
    "bypass": "protwin.calibration.commands.bypass:bypass",
    "checkpoint": "protwin.runtime.offline.command:checkpoint",
    "published": "protwin.calibration.commands.published:published",
    "compare": "protwin.calibration.commands.compare:compare",
}
"""Where the app of each command stands, as module:attribute."""

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
        from importlib.metadata import version

        say(f"protwin {version('protwin')}")
        raise typer.Exit


def missing_runtime(missing: str, command: str, reasons: Sequence[str] = ()) -> ProtwinError:
    """What to tell a user who calls ``command`` without the extra that it needs; ``reasons``: what for, if known."""
    from ..basics.extras import install_command

    why = "".join(f": {reason}" for reason in reasons)
    return ProtwinError(
        f"protwin {command} needs {missing}, which is not installed{why}. Install what training needs: "
        f"{install_command('runtime')}, or pip install '.[runtime]' in a checkout."
    )


_UsageError: Final = cast(type[Exception], typer.BadParameter.__base__)
"""What typer raises for a command line that makes no sense; it exports no name of it."""


class _RootGroup(TyperGroup):
    """Holds the commands and turns errors into messages."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {name: _LazyCommand(name, _loader(place)) for name, place in APPS.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        """Ours in the order of work, then those of other packages."""
        self._add_those_of_other_packages()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; None if there is none."""
        if cmd_name not in self.commands:
            self._add_those_of_other_packages()
        return super().get_command(ctx, cmd_name)

    def _add_those_of_other_packages(self) -> None:
        from importlib.metadata import entry_points

        for entry in sorted(entry_points(group="protwin.commands"), key=lambda entry: entry.name):
            self.commands.setdefault(entry.name, _LazyCommand(entry.name, entry.load))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except KeyboardInterrupt as error:
            raise typer.Exit(report_interruption()) from error
        except _UsageError as error:
            raise _shortened(error) from error.__cause__

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            with warnings_apart():
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except ProtwinError as error:
            raise typer.Exit(report_mistake(str(error))) from error
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in RUNTIME_MODULES:
                raise
            mistake = missing_runtime(missing, ctx.invoked_subcommand or "", getattr(error, "__notes__", ()))
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
    """A complaint about the command line, with whatever it quotes cut short, in plain characters where need be.

    typer writes UTF-8 to streams that are ASCII.
    """
    message = shortened(_number_complaint(error) or getattr(error, "message", "").removeprefix("Value error, "))
    message += _meant_choice(message)
    message += _after_flag(message, getattr(error, "ctx", None))
    if (typed := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        message += _meant(typed, getattr(error, "ctx", None))
        error.possibilities = None
    error.message = plain(message, sys.stderr.encoding or "utf-8")  # type: ignore[attr-defined]
    return error


def _after_flag(message: str, context: Any) -> str:
    """Which option an argument that nobody takes was meant for; empty where it follows none without a value."""
    if context is None or not message.startswith("Got unexpected extra argument"):
        return ""
    flags = {
        name: one for one in context.command.get_params(context) for name in one.opts if getattr(one, "is_flag", 0)
    }
    typed = sys.argv[1:]
    for flag, following in pairwise(typed):
        if flag in flags and not following.startswith("-"):
            return f". {flag} takes no value: {flags[flag].help}"
    return ""


def _number_complaint(error: Exception) -> str:
    """What is wrong with a number; empty if ``error`` is of something else, or of no option.

    typer says it in pydantic's words, without the number.
    """
    from .option_words import number_complaint

    mistakes: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    limits = [getattr(getattr(error, "param", None), limit, None) for limit in ("min", "max")]
    return number_complaint(mistakes[0], *limits) if mistakes else ""


def _meant_choice(message: str) -> str:
    """Which of the values that an option has was meant; empty where ``message`` is of something else, or none is near.

    It is typer's, which names all of them: ``'4bit' is not one of 'nf4', 'fp4', 'int8'.``
    """
    from .option_words import meant_values

    typed, is_choice, choices = message.partition(" is not one of ")
    if not is_choice:
        return ""
    found = meant_values(typed.strip("'"), re.findall(r"'([^']*)'", choices))
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _meant(typed: str, context: Any) -> str:
    """``" Did you mean --ranks?"`` of an option that the command of ``context`` does not have; empty if none is near.

    typer compares letters alone, by which ``--gpu`` resembles ``--output``.
    """
    from .option_words import meant_options

    parameters = [] if context is None else context.command.get_params(context)
    found = meant_options(typed, [option for parameter in parameters for option in parameter.opts])
    return f". Did you mean {' or '.join(found)}?" if found else ""


def _as_mistake(error: ValueError) -> str:
    """The message of a pydantic validation error; any other ValueError is no mistake of the user and goes on."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        raise error
    from ..basics.documents import describe

    return f"{error.title} is inconsistent: {describe(error)}"


def _loader(place: str) -> Callable[[], Any]:
    """What imports the app at ``place``, module:attribute."""
    module, _, attribute = place.partition(":")

    def load() -> Any:
        # The simulator multiplies no large matrices.
        with one_blas_thread() if module.startswith("protwin.sim.") else nullcontext():
            return getattr(import_module(module), attribute)

    return load


class _LazyCommand(TyperCommand):
    """Stands for a command in the list; becomes the command itself when it is called."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        summary = COMMANDS.get(name, "")
        super().__init__(name, help=summary, short_help=summary, rich_markup_mode=None)
        self._load = load

    def load(self) -> typer.Typer:
        """Import the command's module; gives its app."""
        with gc_paused():
            app = self._load()
        assert isinstance(app, typer.Typer), f"{self.name} is no typer app"
        return app

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = typer.main.get_command(self.load())
        context = command.make_context(info_name, args, parent=parent, **extra)
        # What start-up made stays: later collections need not look through it (main switched them off).
        gc.freeze()
        gc.enable()
        return context
