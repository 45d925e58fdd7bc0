"""Errors meant for people: one line that says what happened and what to do next, and the exit code of the command."""

from __future__ import annotations


class TokenmillError(Exception):
    """Something failed; the message is the whole line that a person reads."""

    exit_code = 1


class UsageError(TokenmillError):
    """The caller asked for something that cannot be: a bad option, file or request."""

    exit_code = 2


class BrokerUnreachableError(TokenmillError):
    """No broker answers at the URL, or no URL was given."""

    exit_code = 3


class BrokerFullError(TokenmillError):
    """The broker is at `maxmemory` and takes nothing more until others make room; what it has is served."""


class ModelLoadError(TokenmillError):
    """The model cannot be loaded: an unknown spec, a missing or unreadable file, a missing package."""

    exit_code = 4
