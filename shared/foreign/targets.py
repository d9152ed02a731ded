"""Which linear maps get adapters, as PEFT is told by names, by the ends of paths, or by a pattern of whole paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from .keys import Walk

USUAL_TARGETS: Final = ("q_proj", "v_proj")
"""Of PEFT, for most models, where nobody says."""
_OF_FAMILIES: Final[dict[str, str]] = {
    "q v": "t5 mt5",
    "c_attn": "gpt2 gpt_bigcode",
    "query_key_value": "bloom gpt_neox falcon chatglm",
    "query value": "bert roberta xlm-roberta electra layoutlm",
    "query_proj value_proj": "deberta-v2",
    "in_proj": "deberta",
    "Wqkv": "mpt",
    "qkv_proj": "codegen",
    "q_proj v_proj fc1 fc2": "phi",
    "q_proj k_proj v_proj o_proj": "nemotron_h",
}
"""The same of families that have other names, by these: PEFT's own table, ``model_type`` behind the names."""
_ALL: Final = "all-linear"
_ANY: Final = "*"
"""What stands for anything in the paths that a pattern is written out to: it is in no name."""
_MOST_PATHS: Final = 10_000
_NUMBERS: Final = ("[\\d]+", "\\d+", "[0-9]+", "[0-9]*", "\\d*")
"""Patterns of any layer's number."""
_ANYTHING: Final = (".*?", ".+?", ".*", ".+", "[^.]*", "[^.]+")
_GROUPS: Final = ("(?:", "(")


class _NotReadError(Exception):
    """A pattern has more in it than alternatives, layers and anything."""


def usual_targets(family: str) -> tuple[str, ...]:
    """What PEFT adapts in models of ``family`` (``model_type``) where nobody names linear maps."""
    found = (names for names, families in _OF_FAMILIES.items() if family in families.split())
    return tuple(next(found, " ".join(USUAL_TARGETS)).split())


def lora_targets(walk: Walk) -> tuple[str, ...]:
    """The linear maps that get adapters, as axolotl and TRL name them; none: all of a block.

    PEFT takes a list by names, or by the ends of paths (``mlp.up_proj``), and one string as a pattern of whole paths.
    """
    key = "lora_target_modules"
    given = walk.value(key)
    if given is None:
        walk.means(key, "the maps that are adapted, by PEFT in most models", usually=list(USUAL_TARGETS))
        return USUAL_TARGETS
    if given in (_ALL, [_ALL]):
        walk.means(key, "all linear maps of a block are adapted")
        return ()
    if isinstance(given, str) and not given.isidentifier():
        return _of_pattern(walk, key, given)
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and _is_path(name) for name in names):
        walk.contradict(
            f"{walk.prefix}{key} is no list of names such as q_proj or mlp.up_proj, and patterns in lists are not "
            f"read. Write such a list, or {_ALL}."
        )
        return ()
    walk.means(key, "the linear maps that are adapted")
    return tuple(names)


def _of_pattern(walk: Walk, key: str, pattern: str) -> tuple[str, ...]:
    """The names at the ends of all paths that ``pattern`` stands for."""
    try:
        re.compile(pattern)
        paths = list(_paths(pattern))
    except (re.error, _NotReadError):
        paths = []
    names = tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    if not names or not all(name.isidentifier() for name in names):
        walk.contradict(
            f"{walk.prefix}{key} is a pattern of which it is not clear what maps it names. Write their names as a "
            f"list, or {_ALL}."
        )
        return ()
    walk.means(key, f"a pattern: the maps {', '.join(names)} of all blocks are adapted")
    if any(part.isdecimal() for path in paths for part in path.split(".")):
        walk.leaves_out(key, "the maps of some layers alone are adapted; in the answer those of all")
    return names


def _is_path(name: str) -> bool:
    return all(part.isidentifier() or part.isdecimal() for part in name.split("."))


def _paths(pattern: str) -> Iterator[str]:
    """Every path that a pattern of alternatives stands for; any layer's number and anything else are ``*``.

    A dot is taken as one between the parts of a path, whether it is escaped or not.  Raises _NotReadError.
    """
    paths, rest = _alternatives(pattern)
    if rest:
        raise _NotReadError
    yield from paths


def _alternatives(rest: str) -> tuple[list[str], str]:
    """What stands between bars up to the end of the group, and what is behind it."""
    found: list[str] = []
    while True:
        paths, rest = _sequence(rest)
        found += paths
        if len(found) > _MOST_PATHS:
            raise _NotReadError
        if not rest.startswith("|"):
            return found, rest
        rest = rest[1:]


def _sequence(rest: str) -> tuple[list[str], str]:
    """What stands one behind the other, up to a bar or the end of the group."""
    paths = [""]
    while rest and rest[0] not in "|)":
        parts, rest = _one(rest)
        if rest.startswith("?"):
            parts, rest = [*parts, ""], rest[1:]
        elif rest[:1] in ("*", "+", "{"):
            raise _NotReadError
        paths = [path + part for path in paths for part in parts]
        if len(paths) > _MOST_PATHS:
            raise _NotReadError
    return paths, rest


def _one(rest: str) -> tuple[list[str], str]:
    """The first part of a sequence: a group, any number, anything, a set of characters, or one character."""
    for told in (*_NUMBERS, *_ANYTHING):
        if rest.startswith(told):
            return [_ANY], rest.removeprefix(told)
    for opening in _GROUPS:
        if rest.startswith(opening) and (opening != "(" or not rest.startswith("(?")):
            inner, behind = _alternatives(rest.removeprefix(opening))
            if not behind.startswith(")"):
                raise _NotReadError
            return inner, behind[1:]
    if rest.startswith("["):
        characters, closing, behind = rest[1:].partition("]")
        if not closing or not characters.isalnum():
            raise _NotReadError
        return list(characters), behind
    if rest[0] in "^$":
        return [""], rest[1:]
    if rest.startswith("\\."):
        return ["."], rest[2:]
    if rest[0] == "." or rest[0] == "_" or rest[0].isalnum():
        return [rest[0]], rest[1:]
    raise _NotReadError
