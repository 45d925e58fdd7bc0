"""The root command ``tokenmill``: its verbs are the entry points of one group, so it imports no side of the queue."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click

from tokenmill.shared import log
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.options import extra_option

VERBS = "tokenmill.commands"
INTERRUPTED = 130


class Verbs(click.Group):
    """A group whose commands are entry points, imported when they are asked for."""

    def __init__(self, *args: Any, verbs: Iterable[EntryPoint] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verbs = verbs

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {verb.name: verb for verb in (entry_points(group=VERBS) if self._verbs is None else self._verbs)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._entry_points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self._entry_points().get(cmd_name)
        return None if verb is None else _load(verb)


def _load(verb: EntryPoint) -> click.Command:
    """The verb's command; one that cannot be imported must not take the others with it, and says so when it is used."""
    try:
        command: click.Command = verb.load()
    except Exception as error:
        return _broken(verb, error)
    _add_verbosity(command)
    return command


def _add_verbosity(command: click.Command) -> None:
    """Let ``-v`` be understood on both sides of the verb, and of the verbs below it."""
    if not any(isinstance(p, click.Option) and "--verbose" in p.opts for p in command.params):
        verbosity(command)
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        _add_verbosity(below)


def _broken(verb: EntryPoint, error: Exception) -> click.Command:
    reason = f"`{verb.value}` cannot be loaded: {type(error).__name__}: {error}"

    def fail() -> NoReturn:
        raise TokenmillError(f"the command `{verb.name}` is broken: {reason}") from error

    anything_goes = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(
        verb.name, callback=fail, short_help=f"({reason})", context_settings=anything_goes, add_help_option=False
    )


def _on_verbose(_ctx: click.Context, _option: click.Parameter, given: bool) -> None:
    if given:
        log.be_verbose()


def _on_quiet(_ctx: click.Context, _option: click.Parameter, given: bool) -> None:
    if given:
        log.be_quiet()


def verbosity(command: Any) -> Any:
    """Add ``-v`` and ``-q`` to a command."""
    quiet = extra_option(
        "quiet", short="-q", is_flag=True, expose_value=False, callback=_on_quiet, help="Say only what went wrong."
    )
    verbose = extra_option(
        "verbose", short="-v", is_flag=True, expose_value=False, callback=_on_verbose, help="Say more; show tracebacks."
    )
    return verbose(quiet(command))


@verbosity
@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every option has an environment name. Precedence: command line, then environment, then default. "
    "Exit codes: 0 done, 1 failed, 2 usage, 3 broker unreachable, 4 model cannot load.",
)
@click.version_option(package_name="tokenmill", message="%(prog)s %(version)s")
def root() -> None:
    """Batched text generation behind a Redis queue."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code, with every error told as one line on stderr."""
    log.setup()
    try:
        code = root.main(args=argv, prog_name="tokenmill", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        hint = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        return _say(error.format_message().rstrip(".") + hint, error.exit_code)
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except click.Abort:
        return INTERRUPTED
    except TokenmillError as error:
        return _say(str(error), error.exit_code)
    except Exception as error:
        hint = "" if log.is_verbose() else " (run again with -v for the traceback)"
        return _say(f"{type(error).__name__}: {error}{hint}", TokenmillError.exit_code)
    return code if isinstance(code, int) else 0


def _say(message: str, exit_code: int) -> int:
    if log.is_verbose():
        traceback.print_exc()
    click.echo(f"tokenmill: error: {message}", err=True)
    return exit_code


def main() -> NoReturn:
    """The console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
