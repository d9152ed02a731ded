"""How to install what an optional part needs: protwin is on no package index, but what it needs is."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """The command that installs what ``extra`` names, wherever protwin was installed from.

    The packages and versions are those of the installed distribution; without one, of a checkout, the command for a
    checkout.
    """
    try:
        lines = requires("protwin") or []
    except PackageNotFoundError:
        lines = []
    of_extra = [line.partition(";")[0] for line in lines if re.search(rf"extra == [\"']{extra}[\"']", line)]
    packages = [package.replace(" ", "") for package in of_extra] or [f".[{extra}]"]
    return f"pip install {shlex.join(packages)}"
