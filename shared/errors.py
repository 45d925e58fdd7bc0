"""Errors that reach a person: one line each, and the exit code of the command that meets them."""

from __future__ import annotations


class TokenmillError(Exception):
    """Something failed; the message is the one line a person reads."""

    exit_code = 1


class UsageError(TokenmillError):
    """The command or its input is wrong."""

    exit_code = 2


class BrokerUnreachableError(TokenmillError):
    """The broker cannot be reached."""

    exit_code = 3


class ModelLoadError(TokenmillError):
    """The model cannot be loaded."""

    exit_code = 4
