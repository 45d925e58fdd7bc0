"""The root command: how errors reach people, how verbs are found, and what every option has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points

import click
import pytest

from tokenmill.shared import cli, log
from tokenmill.shared.errors import BrokerUnreachableError, ModelLoadError, TokenmillError, UsageError

MODEL_MODULES = ("numpy", "redis", "gguf", "tokenizers", "jinja2", "rich", "tokenmill.worker.models")


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes functions the only verbs of the command line."""

    def install(*points: Verb) -> None:
        monkeypatch.setattr(cli.root, "_verbs", points)

    yield install
    log.setup()


class Verb:
    """What the command line needs of an entry point: loaded already, or failing to load."""

    value = "some.plugin:verb"

    def __init__(self, name: str, outcome: Callable[[], object] | Exception) -> None:
        self.name = name
        self._outcome = outcome

    def load(self) -> click.Command:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return click.command(self.name)(self._outcome)


def raising(error: BaseException) -> Callable[[], object]:
    """A verb that fails."""

    def verb() -> None:
        """Fail."""
        raise error

    return verb


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TokenmillError("it failed"), 1),
        (UsageError("not like this"), 2),
        (BrokerUnreachableError("no broker"), 3),
        (ModelLoadError("no model"), 4),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: TokenmillError, code: int, verbs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verbs(Verb("fail", raising(error)))
    assert cli.run(["fail"]) == code
    assert capsys.readouterr() == ("", f"tokenmill: error: {error}\n")


def test_an_unexpected_exception_is_one_line_that_tells_of_the_traceback(
    verbs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verbs(Verb("fail", raising(ZeroDivisionError("division by zero"))))
    assert cli.run(["fail"]) == 1
    told = "tokenmill: error: ZeroDivisionError: division by zero (run again with -v for the traceback)\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("arguments", [["-v", "fail"], ["fail", "-v"]])
def test_verbose_shows_the_traceback_on_either_side_of_the_verb(
    arguments: list[str], verbs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verbs(Verb("fail", raising(TokenmillError("it failed"))))
    assert cli.run(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("tokenmill: error: it failed\n")


def test_verbose_comes_from_the_environment_too(
    verbs: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_VERBOSE", "1")
    verbs(Verb("fail", raising(TokenmillError("it failed"))))
    cli.run(["fail"])
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130_and_no_traceback(verbs: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verbs(Verb("wait", raising(KeyboardInterrupt())))
    assert cli.run(["wait"]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_wrong_option_is_one_line_that_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["run", "--nope", "x"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tokenmill: error: No such option")
    assert told.endswith(" (see `tokenmill run --help`)\n")
    assert told.count("\n") == 1


def test_a_verb_decides_the_exit_code(verbs: Callable[..., None]) -> None:
    verbs(Verb("give", lambda: 4))
    assert cli.run(["give"]) == 4


def test_a_plugin_that_cannot_be_imported_names_itself_and_hides_nobody(
    verbs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Verb("broken", ImportError("no module named 'spam'"))
    verbs(broken, Verb("fine", lambda: 0))
    assert cli.run(["--help"]) == 0
    assert "fine" in capsys.readouterr().out
    assert cli.run(["broken", "--any", "thing"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "the command `broken` is broken: `some.plugin:verb`" in told
    assert "no module named 'spam'" in told
    assert cli.run(["fine"]) == 0


def commands() -> list[click.Command]:
    """The root command, all verbs of this distribution, and the verbs below them."""
    return [cli.root, *below(cli.root)]


def below(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from below(command)


def test_the_verbs_are_there() -> None:
    assert {point.name for point in entry_points(group=cli.VERBS)} >= {
        *("cancel", "dead", "demo", "enqueue", "info", "queue", "run", "worker")
    }


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_every_option_has_an_environment_name_and_shows_it(command: click.Command) -> None:
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in ("help", "version"):
            longest = max(option.opts, key=len)
            assert option.envvar == "TOKENMILL_" + longest.removeprefix("--").replace("-", "_").upper()
            assert option.show_envvar, option.name
            assert option.help, option.name


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_every_command_is_explained_in_one_short_line(command: click.Command) -> None:
    line = command.get_short_help_str(limit=75)
    assert line
    assert not line.endswith("...")


@pytest.mark.parametrize("arguments", [["queue", "limits", "-v", "-q"], ["dead", "-v", "list"]])
def test_verbosity_is_understood_on_every_side_of_a_nested_verb(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENMILL_REDIS", raising=False)
    assert cli.run(arguments) == 3
    assert "no broker is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["--help", "run --help", "enqueue --help", "info --help", "demo --help", "dead list --help"]
)
def test_help_imports_no_model_and_no_redis(verb: str) -> None:
    code = (
        "import sys; from tokenmill.shared import cli; code = cli.run(sys.argv[1:]);"
        f"print([name for name in {MODEL_MODULES!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *verb.split()], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "Usage: tokenmill" in done.stdout


def test_help_tells_the_precedence_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Precedence: command line, then environment, then default." in text
    assert "3 broker unreachable, 4 model cannot load" in text
