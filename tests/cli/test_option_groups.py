"""Groups of options: what Typer sees of them, and what the command gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from protwin.shared.cli.option_groups import with_groups

Size = Annotated[int, typer.Option("--size", help="How large.")]
Names = Annotated[list[str] | None, typer.Option("--name", help="Called so.")]
Loud = Annotated[bool, typer.Option("--loud", help="Shout.")]


@dataclass(frozen=True, kw_only=True)
class Group:
    size: Size
    names: Names = None


@dataclass(frozen=True, kw_only=True)
class LargerGroup(Group):
    loud: Loud = False


@dataclass(frozen=True, kw_only=True)
class OuterGroup:
    shade: str = "grey"
    inner: Group
    loud: Loud = False


@dataclass(frozen=True, kw_only=True)
class ShadedGroup(OuterGroup):
    shade: Annotated[str, typer.Option("--shade")] = "blue"


First = Annotated[str, typer.Option("--first")]
Last = Annotated[int, typer.Option("--last")]


def test_a_group_is_an_option_a_field_in_its_place_and_required_ones_come_first() -> None:
    app, told = typer.Typer(), []

    @app.command()
    @with_groups
    def command(*, first: First = "a", group: LargerGroup, last: Last = 7) -> None:
        """Tell."""
        told.append((first, group, last))

    given = CliRunner().invoke(app, ["--size", "3", "--name", "x", "--name", "y", "--loud", "--last", "8"])
    assert given.exit_code == 0, given.output
    assert CliRunner().invoke(app, ["--size", "4"]).exit_code == 0
    assert told == [
        ("a", LargerGroup(size=3, names=["x", "y"], loud=True), 8),
        ("a", LargerGroup(size=4, names=None, loud=False), 7),
    ]
    assert "--size" in CliRunner().invoke(app, []).output, "a field without a default is required"
    options = [parameter.opts[0] for parameter in typer.main.get_command(app).params]
    assert options[:5] == ["--size", "--first", "--name", "--loud", "--last"]


def test_groups_lie_in_groups_and_a_field_without_an_option_keeps_its_default_until_a_subclass_declares_one() -> None:
    app, told = typer.Typer(), []

    @app.command()
    @with_groups
    def plain(*, group: OuterGroup) -> None:
        """Tell."""
        told.append(group)

    @app.command()
    @with_groups
    def shaded(*, first: First = "a", group: ShadedGroup) -> None:
        """Tell."""
        told.append(group)

    for given in (["plain", "--size", "3"], ["shaded", "--name", "x", "--size", "4", "--shade", "red", "--loud"]):
        assert CliRunner().invoke(app, given).exit_code == 0, given
    assert told == [
        OuterGroup(inner=Group(size=3)),
        ShadedGroup(shade="red", inner=Group(size=4, names=["x"]), loud=True),
    ]
    assert told[0].shade == "grey"
    found = {name: [of.opts[0] for of in one.params] for name, one in typer.main.get_command(app).commands.items()}
    assert found == {
        "plain": ["--size", "--name", "--loud"],
        "shaded": ["--size", "--first", "--shade", "--name", "--loud"],
    }
