"""Streams that cannot show all of Unicode: every command prints plain characters, and no command fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from protwin.shared.basics.plain_text import ESCAPED, PLAIN, plain
from protwin.shared.basics.units import format_seconds
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.record import Origin, Record
from tests.cli.conftest import Protwin
from tests.proof_size import some_quick

ENCODINGS = ("ascii", "cp1252", "latin-1")
MODEL = ("--model=workload.json", "--hardware=machine.toml")
COMMANDS = (
    ("hardware", "parts"),
    ("hardware", "show", "machine.toml"),
    ("models",),
    ("search", *MODEL, "--device-budget=700MiB"),
    ("simulate", "--plan=plan.json", *MODEL),
    ("compare", "predicted.json", "measured.json"),
    ("advise", "--model=workload.json", "--global-batch=2", "--hardware=machine.toml", "--processes=1"),
    ("search", *MODEL, "--device-budget=1µB − 2"),
    ("simulate", "--plan=plan−.json", *MODEL),
    ("search", *MODEL, "--n–buffer=2"),
    ("sear×ch",),
)
"""All of them print tables, or end in a message, with characters that are not in ASCII."""

RUN_ALL = """
    import io, json, sys
    from protwin.shared.cli.main import main

    ended = []
    for encoding, arguments in json.loads(sys.argv[1]):
        sys.argv = ["protwin", *arguments]
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        err = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
        sys.stdout, sys.stderr = out, err
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        out.flush(), err.flush()
        ended.append((code, out.buffer.getvalue().hex(), err.buffer.getvalue().hex()))
    sys.__stdout__.write(json.dumps(ended))
"""
"""Many commands in one process, each with streams of its own; what they wrote, as hexadecimal digits."""


def test_every_command_in_every_encoding(folder: Path, environment: dict[str, str], protwin_here: Protwin) -> None:
    """What an encoding shows is the text of UTF-8 with each missing character in plain ones."""
    machine = Hardware.load(folder / "machine.toml")
    (folder / "machine.toml").write_text(
        (folder / "machine.toml").read_text().replace(machine.name, "Zoë's 3090 \N{RIGHTWARDS ARROW} fast")
    )
    assert protwin_here("simulate", "--plan=plan.json", *MODEL, "--output=predicted.json").returncode == 0
    predicted = Record.load(folder / "predicted.json")
    predicted.model_copy(update={"origin": Origin.MEASURED, "machine": "ours"}).save(folder / "measured.json")

    turns = {arguments: ENCODINGS[place % len(ENCODINGS)] for place, arguments in enumerate(COMMANDS)}
    calls = [(encoding, arguments) for arguments, turn in turns.items() for encoding in {"utf-8", "ascii", turn}]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN_ALL), json.dumps(calls)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended = dict(zip(calls, json.loads(done.stdout), strict=True))
    assert not any(b"Traceback" in bytes.fromhex(err) for _, _, err in ended.values())
    for (encoding, arguments), (code, *written) in ended.items():
        whole_code, *whole = ended["utf-8", arguments]
        assert code == whole_code
        for bytes_of_one, bytes_of_utf_8 in zip(written, whole, strict=True):
            shown = bytes.fromhex(bytes_of_one).decode(encoding)
            expected = plain(bytes.fromhex(bytes_of_utf_8).decode("utf-8"), encoding)
            assert shown.split() == _without_rules(shown, expected).split(), (encoding, arguments)
            assert "?" not in shown.replace("mean", "").replace("?", "", expected.count("?")), (encoding, shown)
    told = b"".join(bytes.fromhex(out + err) for _, out, err in ended.values())
    assert all(character.encode() in told for character in "−µ─→×"), "the commands show what is tested"


def _without_rules(shown: str, expected: str) -> str:
    """``expected`` with rules as long as ``shown`` has them: plain words may be longer, and columns wider."""
    rules = [word for word in shown.split() if set(word) <= {"-", "─"} and len(word) > 3]
    words = expected.split()
    places = [place for place, word in enumerate(words) if set(word) <= {"-", "─"} and len(word) > 3]
    assert len(rules) == len(places)
    for place, rule in zip(places, rules, strict=True):
        words[place] = rule
    return " ".join(words)


@some_quick(
    "settings",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}],
    ids=["PYTHONIOENCODING", "LC_ALL"],
    quick=1,
)
def test_a_pipe_that_takes_ascii_alone(
    protwin: Protwin, folder: Path, settings: dict[str, str], environment: dict[str, str]
) -> None:
    """Files are UTF-8 whatever streams are; JSON on standard output is the same document."""
    environment.pop("PYTHONIOENCODING", None)
    name = "Zoë's 3090"
    (folder / "machine.toml").write_text((folder / "machine.toml").read_text().replace("rtx-3090", name), "utf-8")
    shown = protwin("hardware", "show", "machine.toml", "--output=out.json", **settings)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "Zoe's 3090" in shown.stdout
    assert shown.stdout.isascii()
    for arguments in (("--json",), ("--output=-",)):
        told = protwin("hardware", "show", "machine.toml", *arguments, **settings)
        assert told.stdout.isascii()
        path = folder / ("again.json" if arguments == ("--json",) else "again.toml")
        path.write_text(told.stdout)
        assert Hardware.load(path) == Hardware.load(folder / "out.json") == Hardware.load(folder / "machine.toml")
    assert name in (folder / "out.json").read_text("utf-8")


def test_what_was_asked_for_such_characters_is_done(protwin: Protwin, folder: Path) -> None:
    shown = protwin("hardware", "list", PYTHONIOENCODING="ascii:backslashreplace")
    assert shown.returncode == 0
    assert "\\u2500" in shown.stdout


def test_columns_stay_aligned_where_plain_words_are_longer() -> None:
    from protwin.shared.tables.table import Table, in_words_of
    from protwin.shared.tables.terminal import as_text

    table = Table(columns=("", ">error", ">time"), rows=[("a", "±10 %", "5 µs"), ("b", "3 %", "12 ms")])
    lines = as_text(in_words_of([table], lambda text: plain(text, "ascii"))).splitlines()
    assert len({len(line) for line in lines if line[:1] in "ab"}) == 1
    assert any("+-10 %" in line and "5 us" in line for line in lines)


def test_plain_text_and_escapes() -> None:
    text = "−1 – 2 × 3 µs ± 5 % → é 中 █ ┼ │ \N{NO-BREAK SPACE}x \U0001f600"
    assert plain(text, "utf-8") == text
    assert plain(text, "ascii") == "-1 - 2 x 3 us +- 5 % -> e ? # + |  x ?"
    assert plain(text, "cp1252") == "-1 – 2 × 3 µs ± 5 % -> é ? # + | \N{NO-BREAK SPACE}x ?"
    for encoding in ENCODINGS:
        assert text.encode(encoding, PLAIN).decode(encoding) == plain(text, encoding)
        assert json.loads(json.dumps(text, ensure_ascii=False).encode(encoding, ESCAPED).decode(encoding)) == text
    name = os.fsdecode(b"plan\xff.json")
    assert name.encode("ascii", PLAIN) == name.encode("utf-8", PLAIN) == b"plan\xff.json"
    assert plain(format_seconds(1.5e-6), "ascii") == "1.5 us"
