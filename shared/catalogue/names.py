"""Names as people write them: the one entry of the catalogue that a name certainly means, if there is one.

Upper case, blanks, hyphens and underscores make no difference (``RTX 3090``, ``llama3-8b``).  A model may be called by
its name on the Hugging Face hub, with or without its owner, and by another one there that has the same architecture,
sizes and published element type.  A device may be called as its driver calls it (``NVIDIA A100-SXM4-80GB``), and a
machine by a number of devices (``8xH100``).  What could mean two entries means none: then the nearest names are told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Final

from .data_files import machine_sections, model_file_names, read_model_file

_OTHER_MODEL_NAMES: Final = {"llama-3-405b": "llama-3.1-405b"}
"""What models are called besides; Llama 3 had its largest model with release 3.1."""
_SAME_ARCHITECTURE: Final[Mapping[str, tuple[str, ...]]] = {
    **{
        f"llama-2-{size}": (f"Llama-2-{size}", f"Llama-2-{size}-chat-hf", f"Llama-2-{size}-chat")
        for size in ("7b", "13b", "70b")
    },
    **{f"llama-3-{size}": (f"Meta-Llama-3-{size}-Instruct", f"Llama-3-{size}-Instruct") for size in ("8b", "70b")},
    **{
        f"llama-3.1-{size}": (f"Meta-Llama-3.1-{size}", f"Meta-Llama-3.1-{size}-Instruct", f"Llama-3.1-{size}-Instruct")
        for size in ("8b", "70b", "405b")
    },
    **{f"llama-3.2-{size}": (f"Llama-3.2-{size}-Instruct",) for size in ("1b", "3b")},
    "mistral-7b": ("Mistral-7B-Instruct-v0.1",),
    "mixtral-8x7b": ("Mixtral-8x7B-Instruct-v0.1",),
    **{f"qwen2.5-{size}": (f"Qwen2.5-{size}-Instruct",) for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")},
    **{f"qwen3-{size}": (f"Qwen3-{size}-Base",) for size in ("0.6b", "1.7b", "4b", "8b", "14b")},
}
"""Other names on the hub of the same sizes in the same element type: tuned ones, and bases of what is tuned."""
_HUB: Final = re.compile(r"config\.json of (\S+/\S+) on the Hugging Face hub")

_MEMORY: Final = re.compile(r"\d+gb")
_NOISE: Final = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|generation|oam|sxm\d?|hbm\de?")
"""Words that drivers and shops add to a device's name, and that tell no two of the catalogue's apart."""
_NUMBER_FIRST: Final = re.compile(r"\s*(\d+)\s*[x×*]\s*(?=[^\d\s])(.+)", re.IGNORECASE)
_NUMBER_LAST: Final = re.compile(r"(.*[^\s])\s*[x×*]\s*1\s*", re.IGNORECASE)
_SEVERAL_LAST: Final = re.compile(r"(.*[^\s_-])[\s_-]*[x×*]\s*(\d+)\s*", re.IGNORECASE)
_OF_SEVERAL: Final = re.compile(r"(.+)-x(\d+)(?:-.+)?")
"""Names of the catalogue's machines with several devices."""
_MOST_DIGITS: Final = 6
_LONGEST: Final = 200
"""Characters of a name that is looked at; no known one is as long."""


def plain_key(name: str) -> str:
    """What is left of a name without case, blanks, hyphens and underscores."""
    return re.sub(r"[\s_/-]+", "", name.casefold())


def written_alike(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is but for case and separators; None if none is, or several."""
    key = plain_key(name)
    alike = [candidate for candidate in known if plain_key(candidate) == key] if key else []
    return alike[0] if len(alike) == 1 else None


def model_called(name: str) -> str | None:
    """The catalogue's name of the model called ``name``; None if it is none of the catalogue's for certain."""
    if name in model_file_names():
        return name
    if len(name) > _LONGEST:
        return None
    return _models_by_key().get(plain_key(name))


def hub_name(name: str) -> str:
    """Of a name with an owner on the hub, the name alone."""
    return name.rpartition("/")[2] or name


@cache
def _models_by_key() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for known in model_file_names():
        on_hub = _HUB.search(json.dumps(read_model_file(known)["source"]))
        others = list(_SAME_ARCHITECTURE.get(known, ()))
        owner = ""
        if on_hub is not None:
            owner = on_hub[1].partition("/")[0]
            others.append(on_hub[1].partition("/")[2])
        for other in (known, *others):
            found[plain_key(other)] = known
            if owner:
                found[plain_key(f"{owner}/{other}")] = known
    return found | {plain_key(other): known for other, known in _OTHER_MODEL_NAMES.items()}


def machine_called(name: str) -> str | None:
    """The catalogue's name of the machine called ``name``, with one device or several; None if there is none."""
    return _device_called(name, tuple(machine_sections("machines")))


def device_called(name: str) -> str | None:
    """The catalogue's name of the device called ``name``; None if there is none."""
    return _device_called(name, tuple(machine_sections("devices")))


def several_called(name: str) -> tuple[str, int] | None:
    """The machine of one device of which ``name`` asks for several, and how many (``2x RTX 4090``, ``rtx-4090-x2``).

    None where it asks for one, or of a device that the catalogue does not have.
    """
    if len(name) > _LONGEST:
        return None
    first, last = _NUMBER_FIRST.fullmatch(name), _SEVERAL_LAST.fullmatch(name)
    if first is None and last is None:
        return None
    number, device = (first[1], first[2]) if first is not None else (last[2], last[1]) if last is not None else ("", "")
    meant = machine_called(device)
    return None if meant is None or len(number) > _MOST_DIGITS else (meant, int(number))


def machines_with(name: str, num_devices: int) -> tuple[str, ...]:
    """Machines of the catalogue with so many devices or more of that of the machine ``name``."""
    found = [(known, _OF_SEVERAL.fullmatch(known)) for known in machine_sections("machines")]
    return tuple(known for known, of in found if of is not None and of[1] == name and int(of[2]) >= num_devices)


def _device_called(name: str, known: tuple[str, ...]) -> str | None:
    """Several readings, the strictest first; the first one that names anything decides.

    The last reading leaves out the memory: of several devices that differ in it none is meant, but one is whose
    variants all have a word more (``H100`` is no ``h100-80gb-pcie``).
    """
    if name in known:
        return name
    if len(name) > _LONGEST:
        return None
    number = _NUMBER_FIRST.fullmatch(name)
    if number is not None:
        name = number[2] if int(number[1]) == 1 else f"{number[2]} x{int(number[1])}"
    elif (one := _NUMBER_LAST.fullmatch(name)) is not None:
        name = one[1]
    wanted = set(_readings(name))
    for key_of in (lambda each: {plain_key(each)}, lambda each: set(_readings(each)), _without_memory):
        alike = [candidate for candidate in known if key_of(candidate) & wanted]
        if alike:
            return alike[0] if len(alike) == 1 else None
    return None


def _readings(name: str) -> Iterator[str]:
    """The name's words run together, as they stand and in order, without those that say nothing."""
    words = [word for word in re.split(r"[\s_/-]+", name.casefold()) if word and not _NOISE.fullmatch(word)]
    yield "".join(words)
    yield " ".join(sorted(words))


def _without_memory(name: str) -> set[str]:
    return set(_readings(" ".join(word for word in name.split("-") if not _MEMORY.fullmatch(word))))
