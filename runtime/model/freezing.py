"""Parts of a model that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.basics.suggestions import did_you_mean


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the parameters that ``patterns`` name out of training, in place.

    A pattern is a name (``"model.embed_tokens"``: all that lies below it), or has wildcards
    (``"model.layers.[0-9].*"``).  A tied parameter is meant by any of its names.  Raises WorkloadError if a pattern
    names nothing, or if nothing is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        meant = [parameter for name, parameter in named if _is_meant(name, pattern)]
        if not meant:
            parts = dict.fromkeys(path for path, _ in model.named_modules() if path and path.count(".") < 3)
            raise WorkloadError(
                f"no parameter is called {pattern!r}, which is to be frozen. {did_you_mean(pattern, parts):.300}"
            )
        for parameter in meant:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise WorkloadError(f"freezing {', '.join(patterns)} leaves no parameter to train. Leave some out.")


def _is_meant(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
