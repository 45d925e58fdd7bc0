"""Options are the settings: flag, environment name, default and precedence come from one table."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tokenmill.shared.options import extra_option, option
from tokenmill.shared.settings import DEFAULTS, Settings, envvar, flag


@click.command()
@option("slots")
@option("block_s")
@option("queue", short="-Q")
@extra_option("json", is_flag=True, help="As JSON.")
def show(**given: Any) -> None:
    """Print what arrived."""
    click.echo(repr(given))


def arrived(*arguments: str, **environment: str) -> Any:
    result = CliRunner().invoke(show, arguments, env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return eval(result.output, {})  # noqa: S307 (our own repr)


def test_defaults_come_from_the_table() -> None:
    assert arrived() == {"slots": DEFAULTS.slots, "block_s": DEFAULTS.block_s, "queue": DEFAULTS.queue, "json": False}


def test_the_command_line_beats_the_environment_which_beats_the_default() -> None:
    assert arrived(TOKENMILL_SLOTS="3", TOKENMILL_BLOCK="0.5", TOKENMILL_JSON="1") == {
        "slots": 3,
        "block_s": 0.5,
        "queue": "default",
        "json": True,
    }
    assert arrived("--slots", "5", "-Q", "mine", TOKENMILL_SLOTS="3", TOKENMILL_QUEUE="yours")["slots"] == 5


def test_counts_are_positive() -> None:
    result = CliRunner().invoke(show, ["--slots", "0"])
    assert result.exit_code == 2
    assert "0 is not in the range" in result.output


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_every_setting_is_explained_and_named_by_the_rules(name: str) -> None:
    assert next(field for field in fields(Settings) if field.name == name).metadata["help"].endswith(".")
    assert flag(name) == "--" + name.removesuffix("_s").replace("_", "-")
    assert envvar(name).startswith("TOKENMILL_")
