"""Command-line options made from the settings table, so that flags, environment names and defaults never drift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tokenmill.shared import settings

F = TypeVar("F", bound=Callable[..., Any])


def option(name: str, *, short: str | None = None, **overrides: Any) -> Callable[[F], F]:
    """A click option for one row of the settings table; the command gets it as the keyword ``name``.

    ``@option("slots")`` is ``--slots`` with the environment name ``TOKENMILL_SLOTS`` and the table's default and help;
    ``block_s`` is ``--block`` and still arrives as ``block_s``. Precedence: command line, environment, default.
    Keywords override what is passed to ``click.option``, as in ``option("slots", type=click.IntRange(1, 64))``.
    """
    default = getattr(settings.DEFAULTS, name)
    return extra_option(name, short=short, default=default, **{"help": settings.help_text(name), **overrides})


def extra_option(name: str, *, short: str | None = None, **attributes: Any) -> Callable[[F], F]:
    """A click option that is not in the settings table, named by the same rules: flag, environment name, keyword."""
    flags = [settings.flag(name), *([short] if short else []), name]
    merged = {
        "envvar": settings.envvar(name),
        "show_envvar": True,
        "show_default": attributes.get("default") is not None and not attributes.get("is_flag", False),
        **attributes,
    }
    if isinstance(merged.get("default"), int) and "type" not in merged and not merged.get("is_flag", False):
        merged["type"] = click.IntRange(min=1)
    return click.option(*flags, **merged)
