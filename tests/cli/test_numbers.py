"""Numbers of options: whatever is typed, a refusal quotes it, says what is wrong, and names a number to write."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from typer.main import get_command

from protwin.shared.cli.root import APPS, root_command
from tests.cli.conftest import Protwin

NO_NUMBERS: Final = ("abc", "1.5.2", "½", "nan", "8 k", "--", "1e", "\x1b[31m")
NO_WHOLE_NUMBERS: Final = (*NO_NUMBERS, "1.5", "1e999999999", "9" * 5_000)
PYDANTIC: Final = re.compile(r"Input should|[Uu]nable to parse|Traceback")


def numeric_options() -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Every option with limits: its command, its name, and what typer knows of it."""
    for name in APPS:
        loaded = get_command(root_command().commands[name].load())  # type: ignore[attr-defined]
        below = getattr(loaded, "commands", None)
        for path, command in {(name, sub): one for sub, one in below.items()}.items() if below else [((name,), loaded)]:
            for parameter in command.params:
                if (parameter.min, parameter.max) != (None, None):
                    yield path, max(parameter.opts, key=len), parameter


OPTIONS: Final = [pytest.param(*one, id=" ".join((*one[0], one[1]))) for one in numeric_options()]


def is_whole(option: str) -> bool:
    """Whether the option counts something; all others are shares, seconds and rates."""
    return option not in ("--seconds", "--minutes", "--time-limit", "--margin", "--learning-rate", "--weight-decay")


def told(protwin: Protwin, path: tuple[str, ...], option: str, typed: str) -> str:
    """What is said of ``typed``, which the command cannot take; it comes before whatever else is missing."""
    result = protwin(*path, f"{option}={typed}")
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    message = " ".join(result.stderr.split())
    assert f"Invalid value for '{option}'" in message.replace(f"'{option}' / '-", f"'{option}': '-"), message
    assert not PYDANTIC.search(message), message
    return message.partition(f"'{option}'")[2]


@pytest.mark.parametrize(("path", "option", "parameter"), OPTIONS)
def test_what_cannot_be_is_answered_with_what_can(
    protwin_here: Protwin, path: tuple[str, ...], option: str, parameter: Any
) -> None:
    """The answer is within the limits that the option's help states, and the next ones beyond them are refused."""
    draw = random.Random(f"{path}{option}")
    for typed in draw.sample(NO_WHOLE_NUMBERS if is_whole(option) else NO_NUMBERS, 3):
        message = told(protwin_here, path, option, typed)
        assert re.search(r" is no (whole )?number\. Write ", message), message
        assert repr(typed)[:40] in message
    for limit, beyond, wrong in ((parameter.min, -1, "too small"), (parameter.max, 1, "too large")):
        if limit is not None:
            message = told(protwin_here, path, option, str(limit + beyond))
            assert f"'{limit + beyond}' is {wrong}. Write " in message, message
            assert f"{limit:,}".removesuffix(".0") in message.partition(" Write ")[2]


@pytest.mark.parametrize("seed", range(20))
def test_another_notation_is_answered_with_the_same_number(protwin_here: Protwin, seed: int) -> None:
    """What the message says to write is then taken; numbers that no rank count can be are not proposed."""
    draw = random.Random(seed)
    path, option, parameter = draw.choice([one for one in numeric_options() if is_whole(one[1])])
    number = draw.choice([1, 2, 3]) * 10 ** draw.randint(1, 9)
    typed = draw.choice([f"{number:.0e}", f"{number:,}", "".join("٠١٢٣"[int(digit)] for digit in str(number))])
    result = protwin_here(*path, option, typed)
    message = " ".join(result.stderr.split())
    if typed.isascii() and typed.isdigit():
        assert "is no whole number" not in message
    elif parameter.min <= number <= (parameter.max or number):
        assert f"'{typed}' is no whole number. Write {number}." in message
        again = " ".join(protwin_here(*path, option, str(number)).stderr.split())
        assert f"Invalid value for '{option}'" not in again
    else:
        assert f"'{typed}' is no whole number. Write one from " in message
