"""The command-line root: lazy, and one message for every mistake."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

from protwin.shared.basics.extras import install_command
from protwin.shared.cli.root import APPS, COMMANDS
from tests.cli.conftest import Protwin

HEAVY = ("numpy", "psutil", "pydantic", "rich", "scipy", "simpy", "torch", "transformers")
"""Modules that neither the help of the root nor finding a command may import."""


def python(code: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


RUN_ROOT = """
    import importlib.metadata, sys, types
    from importlib.metadata import EntryPoint

    import protwin.shared.cli.root as cli_root
    from protwin.shared.cli.main import main

    planted = sys.modules["planted"] = types.ModuleType("planted")
    planted.search = cli_root.typer.Typer(rich_markup_mode=None)

    @planted.search.command()
    def command() -> None:
        {body}

    cli_root.APPS["search"] = "planted:search"
    sys.argv = ["protwin", "search"]
    main()
"""
"""A root whose one command does what the test wants; it runs in a process of its own."""


def planted(body: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What ``protwin search`` looks like from outside if its command were ``body``."""
    return python(RUN_ROOT.format(body=body), environment)


def test_help_lists_every_command_in_the_order_of_work(protwin: Protwin) -> None:
    result = protwin("--help")
    assert result.returncode == 0
    places = [result.stdout.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)


def test_no_arguments_show_the_help(protwin: Protwin) -> None:
    result = protwin()
    assert "Usage: protwin" in result.stdout + result.stderr
    assert all(name in result.stdout + result.stderr for name in COMMANDS)


def test_version(protwin: Protwin) -> None:
    assert protwin("--version").stdout == f"protwin {version('protwin')}\n"


def test_help_imports_nothing_heavy(environment: dict[str, str]) -> None:
    watch = f"""
        import atexit, sys
        heavy = {HEAVY!r}
        atexit.register(lambda: print(sorted(m for m in heavy if m in sys.modules), file=sys.stderr))
        {{extra}}
        from protwin.shared.cli.main import main
        sys.argv = ["protwin", "--help"]
        main()
    """
    result = python(watch.format(extra=""), environment)
    assert result.stdout.startswith("Usage: protwin")
    assert result.stderr == "[]\n"
    assert python(watch.format(extra="import rich"), environment).stderr == "['rich']\n", "the watch sees imports"


@pytest.mark.parametrize("typed", ["serch", "simulat", "hardwares"])
def test_an_unknown_command_names_the_nearest(protwin: Protwin, typed: str) -> None:
    result = protwin(typed)
    assert result.returncode == 2
    nearest = {"serch": "search", "simulat": "simulate", "hardwares": "hardware"}[typed]
    assert f"Did you mean '{nearest}'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_is_one_message_and_exit_code_2(environment: dict[str, str]) -> None:
    body = "from protwin.shared.basics.errors import PlanError; raise PlanError('n_buffer is 0. Raise it to 2.')"
    result = planted(body, environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: n_buffer is 0. Raise it to 2.\n"


def test_a_validation_error_is_a_mistake_too(environment: dict[str, str]) -> None:
    body = "from protwin.shared.schema.plan import Plan; Plan(workload_id='w', chunk_bytes=-1, n_persist=0, n_buffer=1)"
    result = planted(body, environment)
    assert result.returncode == 2
    assert result.stderr.startswith("error: Plan is inconsistent: chunk_bytes: ")
    assert result.stderr.count("\n") == 1


def test_a_broken_invariant_keeps_its_traceback(environment: dict[str, str]) -> None:
    for body in ("assert False", "raise ValueError('bug')", "import no_such_module"):
        result = planted(body, environment)
        assert result.returncode == 1
        assert "Traceback" in result.stderr


def test_an_interruption_is_one_word_and_exit_code_130(environment: dict[str, str]) -> None:
    result = planted("raise KeyboardInterrupt", environment)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_interruption_while_it_starts_leaves_no_traceback(environment: dict[str, str]) -> None:
    code = """
        import sys
        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == "typer":
                    raise KeyboardInterrupt
        from protwin.shared.cli.main import main
        sys.meta_path.insert(0, Interrupting())
        sys.argv = ["protwin", "--help"]
        main()
    """
    result = python(code, environment)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_a_signal_interrupts_a_running_command(environment: dict[str, str]) -> None:
    body = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    result = planted(body, environment)
    assert (result.returncode, result.stderr) == (128 + signal.SIGINT, "interrupted\n")


@pytest.mark.parametrize("where", ["parse_args", "make_context"])
def test_an_interruption_while_arguments_are_read_is_told_too(where: str, environment: dict[str, str]) -> None:
    code = f"""
        import protwin.shared.cli.root as cli_root
        from protwin.shared.cli.main import main
        def interrupted(*_, **__):
            raise KeyboardInterrupt
        setattr(cli_root._RootGroup.__mro__[{int(where == "make_context")}], {where!r}, interrupted)
        main()
    """
    result = python(code, environment)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_interruption_in_a_destructor_is_not_lost(environment: dict[str, str]) -> None:
    """There Python prints KeyboardInterrupt and goes on; the command must end all the same."""
    dying = "type('Dying', (), {'__del__': lambda self: os.kill(os.getpid(), signal.SIGINT)})()"
    result = planted(f"import os, signal, time; {dying}; time.sleep(20)", environment)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_other_errors_in_a_destructor_are_shown(environment: dict[str, str]) -> None:
    result = planted("type('Dying', (), {'__del__': lambda self: 1 / 0})()", environment)
    assert result.returncode == 0
    assert "ZeroDivisionError" in result.stderr


def test_a_reader_that_leaves_causes_no_noise(environment: dict[str, str]) -> None:
    body = "print('line ' * 1000, sep='') or [print(n) for n in range(100_000)]"
    code = textwrap.dedent(RUN_ROOT.format(body=body))
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(600) == 1
    assert errors == b""


@pytest.mark.parametrize("module", ["torch", "transformers.models", "psutil"])
@pytest.mark.parametrize("when", ["at import", "in the command"])
def test_a_missing_extra_says_what_to_install(environment: dict[str, str], module: str, when: str) -> None:
    top = module.partition(".")[0]
    blocked = f"sys.modules[{top!r}] = None; import {module}"
    if when == "in the command":
        result = planted(blocked, environment)
    else:
        code = textwrap.dedent(RUN_ROOT.format(body="pass")).replace(
            'cli_root.APPS["search"] =',
            f"def load(name):\n    {blocked}\ncli_root.import_module = load\ncli_root.APPS['search'] =",
        )
        result = python(code, environment)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: protwin search needs {top}, which is not installed. "
        f"Install what training needs: {install_command('runtime')}, or pip install '.[runtime]' in a checkout.\n"
    )


def test_commands_without_their_extra_are_still_listed(environment: dict[str, str]) -> None:
    code = """
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = sys.modules["psutil"] = None
        from protwin.shared.cli.main import main
        sys.argv = ["protwin", "--help"]
        main()
    """
    result = python(code, environment)
    assert result.returncode == 0
    assert all(name in result.stdout for name in COMMANDS)


def test_a_command_of_another_package_appears_last(environment: dict[str, str]) -> None:
    code = textwrap.dedent(RUN_ROOT.format(body="pass")).replace(
        'cli_root.APPS["search"] = "planted:search"',
        "others = [EntryPoint('another', 'planted:search', 'protwin.commands')]\n"
        "importlib.metadata.entry_points = lambda group: others",
    )
    result = python(code.replace('["protwin", "search"]', '["protwin", "--help"]'), environment)
    assert result.stdout.index("  search ") < result.stdout.index("  another")
    assert python(code.replace('["protwin", "search"]', '["protwin", "another"]'), environment).returncode == 0


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="needs a pseudo-terminal")
def test_errors_are_red_on_a_terminal_alone(environment: dict[str, str]) -> None:
    body = "from protwin.shared.basics.errors import ProtwinError; raise ProtwinError('no.')"
    code = textwrap.dedent(RUN_ROOT.format(body=body))

    def errors_on_a_terminal(variables: dict[str, str]) -> bytes:
        ours, theirs = pty.openpty()
        try:
            subprocess.run([sys.executable, "-c", code], env=variables, stderr=theirs, timeout=600, check=False)
            return os.read(ours, 1000)
        finally:
            os.close(ours)
            os.close(theirs)

    colourful = {name: value for name, value in environment.items() if name != "NO_COLOR"}
    assert errors_on_a_terminal(colourful) == b"\033[1;31merror:\033[0m no.\r\n"
    assert errors_on_a_terminal(environment) == b"error: no.\r\n"


def test_every_command_is_named_after_its_app() -> None:
    assert list(APPS) == list(COMMANDS)
    for name, place in APPS.items():
        module, _, attribute = place.partition(":")
        assert module.startswith("protwin.")
        assert attribute == name.replace("-", "_")
        assert (Path(__file__).parents[2] / module.split(".")[1]).is_dir()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_standard_output_that_is_full() -> None:
    command = [sys.executable, "-c", "from protwin.shared.cli.main import main; main()", "hardware", "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output takes no more")
    assert "Traceback" not in done.stderr


def test_a_value_behind_an_option_without_one_names_the_option(protwin: Protwin) -> None:
    """``--resume FOLDER`` is what other tools have; the folder is that of another option here, which its help names."""
    result = protwin("run", "--plan", "plan.json", "--resume", "kept")
    assert result.returncode == 2
    told = " ".join(result.stderr.split())
    assert "(kept). --resume takes no value: " in told
    assert "--checkpoint" in told


@pytest.mark.parametrize("group", ["", "hardware", "checkpoint"])
def test_what_commands_are_for_is_told_whole(protwin: Protwin, group: str) -> None:
    """click cuts a summary of more than a line at its last word, and 'a folder that...' says nothing."""
    listed = protwin(*group.split(), "--help", COLUMNS="80").stdout.partition("Commands:")[2]
    assert listed
    assert "..." not in listed
