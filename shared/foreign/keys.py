"""Tables of keys: what each key of another tool's file does to time and memory, and how a file is walked by one.

[Note: Four kinds of keys]
A key is *read* where a reader makes something of its value; it *has no effect* on the time and memory of a step, such
as a learning rate; it is *left out* where it changes them and no plan here does the same, so that the answer names it;
or it *contradicts* where an answer without it would be about another training, so that there is none.  The last two
have values at which they change nothing: a key that is off is as one that is not there.  Whatever stands in no table
is unknown, and the answer names it as that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..basics.documents import read_text, stated_once, why_unreadable
from ..basics.errors import FileError, PlanError
from ..basics.suggestions import listed
from ..schema.hardware import AttentionKernel
from .asked_run import AskedRun, KeyNote, KeyValue, Reading, Tool

AUTO: Final = "auto"
TF32: Final = "products of float32 weights run in TF32, which takes less time"
_OFF: Final = (None, False, 0, "", "no", "none", "None", "false", "disabled")
_LONGEST_VALUE: Final = 120


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A key that changes time or memory, and that no plan does the same for."""

    why: str
    off: tuple[Any, ...] = ()
    """Values at which it changes nothing, beside those that say no."""


@dataclass(frozen=True, slots=True)
class Contradicts:
    """A key without which the answer would be about another training."""

    why: str
    off: tuple[Any, ...] = ()
    """As of ``LeftOut``."""


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """What every known key of one tool does; keys of nested sections by their path, with dots."""

    tool: Tool
    read: frozenset[str]
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)
    contradicts: Mapping[str, Contradicts] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    """Keys, or whole sections."""

    def knows(self, key: str) -> bool:
        """Whether ``key`` is in any of the four."""
        return (
            key in self.left_out
            or key in self.contradicts
            or any(part in self.without_effect or part in self.read for part in _above(key))
        )

    @property
    def sections(self) -> frozenset[str]:
        """Paths below which there are keys of the table."""
        keys = {*self.read, *self.left_out, *self.contradicts, *self.without_effect}
        return frozenset(key.rpartition(".")[0] for key in keys if "." in key)


@dataclass
class Walk:
    """A file, as far as it has been read by its table.

    Readers ask for values by their keys; whatever the file has beside is sorted by the table.
    """

    table: KeyTable
    content: Mapping[str, Any]
    prefix: str = ""
    """Of all keys in messages, where the content is a section of a larger file."""
    understood: list[KeyNote] = field(default_factory=list)
    assumed: list[KeyNote] = field(default_factory=list)
    left_out: list[KeyNote] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    opened: set[str] = field(default_factory=set)
    """Sections that another table sorts the keys of."""

    def value(self, key: str, default: Any = None) -> Any:
        """What stands at the path ``key``; ``default`` where nothing does."""
        assert key in self.table.read, f"{key} is read, and in no table"
        found: Any = self.content
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    def has(self, key: str) -> bool:
        """Whether the file says anything else than null at ``key``."""
        return self.value(key) is not None

    def number(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        """A whole number; None where there is none, or where it is ``auto``.  Notes a contradiction if it is none."""
        found = self.value(key, default)
        if found is None or found == AUTO:
            return None
        whole = int(found) if isinstance(found, float) and found.is_integer() else found
        if isinstance(whole, bool) or not isinstance(whole, int) or whole < least:
            self.refuse(key, f"a whole number from {least}")
            return None
        return whole

    def real(self, key: str, default: float | None = None) -> float | None:
        """A number that is not negative; None as of ``number``."""
        found = self.value(key, default)
        if found is None or found == AUTO:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            self.refuse(key, "a number that is not negative")
            return None
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool | None:
        """True or false, written in any of the usual ways; None where it is ``auto``."""
        found = self.value(key, default)
        if found == AUTO:
            return None
        named = {
            "true": True,
            "1": True,
            "yes": True,
            "false": False,
            "0": False,
            "no": False,
            "none": False,
            "": False,
        }
        if found is None:
            return default
        if isinstance(found, bool) or (isinstance(found, int) and found in (0, 1)):
            return bool(found)
        if isinstance(found, str) and found.lower() in named:
            return named[found.lower()]
        self.refuse(key, "true or false")
        return default

    def text(self, key: str, default: str | None = None) -> str | None:
        """A word; None where there is none, or where it is ``auto``."""
        found = self.value(key, default)
        if found is None or found == AUTO:
            return None
        if not isinstance(found, str):
            self.refuse(key, "a word")
            return default
        return found

    def means(
        self, key: str, about: str, *, usually: Any = None, filled_in: str = "by whoever calls DeepSpeed"
    ) -> None:
        """Note what a key means that the file has, or the value that the tool has where the file is silent, if any.

        ``filled_in``: what is known of who replaces ``auto`` in a file of DeepSpeed, and with what.
        """
        found = self.value(key)
        if found == AUTO and self.table.tool is Tool.DEEPSPEED:
            about = f"filled in {filled_in}"
        if found is not None:
            self.understood.append(KeyNote(key=self.prefix + key, value=shown(found), about=about))
        elif usually is not None and self.value(key, usually) is usually:
            self.assumed.append(KeyNote(key=self.prefix + key, value=shown(usually), about=about))

    def leaves_out(self, key: str, why: str, *, usually: Any = None) -> None:
        """Note that a key that is read is left out for the value that it has, or the tool has in its place."""
        self.left_out.append(KeyNote(key=self.prefix + key, value=shown(self.value(key, usually)), about=why))

    def refuse(self, key: str, wanted: str) -> None:
        """Note that a value is none of those that the tool takes."""
        self.contradictions.append(
            f"{self.prefix}{key} is {shown(self.value(key))}, where {wanted} belongs. Write one."
        )

    def contradict(self, message: str) -> None:
        """Note that there can be no answer."""
        self.contradictions.append(message)

    def reading(
        self, run: AskedRun, *, other: Iterator[Reading] | tuple[Reading, ...] = (), could_be: Tool | None = None
    ) -> Reading:
        """All of the file, with what was read of files beside it.

        Raises PlanError, one message of all that contradicts.
        """
        unknown: list[KeyValue] = []
        refused: dict[str, list[str]] = {}
        silent: list[str] = []
        noted = {note.key for note in (*self.understood, *self.left_out)}
        for key, value in _leaves(self.content, self.table):
            named = self.prefix + key
            if key in self.table.read:
                # Whatever a reader makes something of, it says; the rest is off, or says how what is off would be.
                silent += [named] if named not in noted and key not in self.opened else []
                continue
            if key in self.table.sections and (value == AUTO or not _is_off(value, ())):
                self.contradictions.append(f"{named} is {shown(value)}, where a section of keys belongs. Write one.")
                continue
            if (left := self.table.left_out.get(key)) is not None:
                if _is_off(value, left.off):
                    silent.append(named)
                else:
                    self.left_out.append(KeyNote(key=named, value=shown(value), about=left.why))
            elif (against := self.table.contradicts.get(key)) is not None:
                if _is_off(value, against.off):
                    silent.append(named)
                else:
                    refused.setdefault(against.why, []).append(f"{named} is {shown(value)}")
            elif self.table.knows(key) or (key in self.table.sections and _is_off(value, ())):
                silent.append(named)
            elif value is None:
                silent.append(named)  # whatever it is: no tool makes anything of null
            else:
                unknown.append(KeyValue(key=named, value=shown(value)))
        # Keys of one kind share a reason, which is told once.
        self.contradictions += [f"{listed(keys)}: {why}" for why, keys in refused.items()]
        if self.contradictions:
            raise PlanError(" ".join(dict.fromkeys(self.contradictions)))
        readings = tuple(other)
        return Reading(
            tool=self.table.tool,
            could_be=could_be,
            run=run,
            understood=(*self.understood, *(note for one in readings for note in one.understood)),
            assumed=(*self.assumed, *(note for one in readings for note in one.assumed)),
            left_out=(*self.left_out, *(note for one in readings for note in one.left_out)),
            unknown=(*unknown, *(note for one in readings for note in one.unknown)),
            without_effect=(*silent, *(key for one in readings for key in one.without_effect)),
        )


def shown(value: Any) -> str:
    """A value as JSON, cut short where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except TypeError:  # keys of YAML may be dates or bytes
        text = json.dumps(_named_by_words(value), ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _named_by_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _named_by_words(one) for key, one in value.items()}
    return [_named_by_words(one) for one in value] if isinstance(value, list | tuple) else value


def said(run: Mapping[str, Any]) -> AskedRun:
    """A run of what is known of it: None is what nobody says."""
    return AskedRun.model_validate({name: value for name, value in run.items() if value is not None})


def one_of(walk: Walk, key: str, choices: Mapping[str, Any], found: str | None) -> Any:
    """What ``found`` stands for; None, and a contradiction that names the choices, where it is none of them."""
    if found is None:
        return None
    name = found.lower()
    if name in choices:
        return choices[name]
    walk.contradict(f"{walk.prefix}{key} is {shown(found)}. Choose from {', '.join(choices)}.")
    return None


def words_of(number: int | None, one: str, many: Callable[[int], str] | None = None) -> str:
    """``1 sample``, ``4 samples``."""
    if number is None:
        return "not said"
    return f"{number:,} {one if number == 1 else many(number) if many else one + 's'}"


def _above(key: str) -> Iterator[str]:
    """A key and the sections that it lies in."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def _leaves(content: Mapping[str, Any], table: KeyTable, above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with their values; those of sections where the table knows keys below them."""
    sections = table.sections
    for name, value in content.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and key in sections and key not in table.read:
            yield from _leaves(value, table, f"{key}.")
        else:
            yield key, value


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether a key with this value changes nothing."""
    if isinstance(value, Mapping | list | tuple):
        return not value or value in off
    if isinstance(value, str) and value.lower() in (AUTO, "false", "none"):
        return True
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in (*_OFF, *off))


def recomputes_whole(walk: Walk, *, usually: bool = False) -> bool:
    """Whether reentrant checkpointing is asked for; ``usually``: what the tool has without the key.

    Transformers 5 and TRL have none.  A section that does not say has PyTorch's choice, as transformers 5 makes it.
    """
    key = "gradient_checkpointing_kwargs"
    given = walk.value(key)
    if given is not None and not isinstance(given, Mapping):
        walk.refuse(key, "a section of keys such as use_reentrant")
        return False
    if given is None and usually:
        walk.means(key, "blocks are recomputed to their end", usually={"use_reentrant": True})
    if given is None or not isinstance(given.get("use_reentrant"), bool):
        return given is None and usually
    is_reentrant: bool = given["use_reentrant"]
    end = "to their end" if is_reentrant else "up to what backward reads"
    walk.means(key, f"blocks are recomputed {end}")
    return is_reentrant


_KERNELS: Final = {"flash_attention_2": AttentionKernel.FLASH_2, "flash_attention_3": AttentionKernel.FLASH_3}
"""Values of transformers' ``attn_implementation`` that name a kernel of the cost model."""


def attention_of(walk: Walk, key: str, given: Any) -> AttentionKernel | None:
    """What computes attention where ``key`` has ``given`` as transformers' ``attn_implementation``; None: PyTorch's."""
    if given is None or given == "sdpa":
        return None
    kernel = _KERNELS.get(given) if isinstance(given, str) else None
    if kernel is None:
        walk.leaves_out(key, f"attention is computed by {given}; in the answer by what PyTorch takes")
    else:
        walk.means(key, f"attention is computed by {kernel}")
    return kernel


def section(walk: Walk, key: str, folder: Path | None) -> Mapping[str, Any]:
    """The section at ``key``, of the file itself or of one that it names, in ``folder``; empty where there is none.

    Raises FileError if the file that is named cannot be read.
    """
    given = walk.value(key)
    if given is None:
        return {}
    if isinstance(given, Mapping):
        walk.opened.add(key)
        return given
    if not isinstance(given, str):
        walk.refuse(key, "a section, or the path of its JSON file")
        return {}
    path = next((one for one in ((folder or Path()) / given, Path(given)) if one.is_file()), None)
    if path is None:
        place = (folder or Path()) / given
        raise FileError(
            f"{key} is {shown(given)}, and there is no file {place}. Put it there, or its content in place."
        )
    try:
        found = json.loads(read_text(path), object_pairs_hook=stated_once)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}, which {key} names, is no JSON: {why_unreadable(error)}.") from error
    if not isinstance(found, Mapping):
        raise FileError(f"{path}, which {key} names, holds a {type(found).__name__}, where a section belongs.")
    walk.means(key, "read of that file")
    return found
