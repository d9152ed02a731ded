"""The command ``models``: what the catalogue knows by name."""

from __future__ import annotations

import typer

from ...shared.catalogue.models import ModelList
from ...shared.cli.options import JsonFlag, command_app, examples
from ...shared.cli.output import show

models = command_app()


@models.command(epilog=examples("protwin models", "protwin models --json"))
def models_command(as_json: JsonFlag = False) -> None:
    """List the models of the catalogue, each with its parameters and where its configuration was published."""
    listed = ModelList.of_catalogue()
    if as_json:
        typer.echo(listed.to_json(), nl=False)
    else:
        from ...shared.tables.workloads import models_table

        show(models_table(listed))
