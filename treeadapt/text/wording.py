"""Advice in the words of who reads it: arguments of Python, or options of the command.

What writes a message knows both and says both; which is shown is decided here, once.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator

# The caller cannot hand it over: a message is written many rooms below the command.
_options: contextvars.ContextVar[Collection[str] | None] = contextvars.ContextVar(
    "options", default=None
)


@contextlib.contextmanager
def command_words(options: Collection[str] = ()) -> Iterator[None]:
    """Word advice as the command takes it, inside of this.

    Args:
        options: that it has, ``--target``, and its arguments, ``TARGET``.
    """
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def offered(*options: str) -> list[str]:
    """Return those of some options that the running command has."""
    return [option for option in options if option in (_options.get() or ())]


def worded(python: str, command: str) -> str:
    """Return one of two wordings of the same advice.

    Example:
        >>> worded("allow_regex=True", "--allow-regex")
        'allow_regex=True'
        >>> with command_words():
        ...     worded("allow_regex=True", "--allow-regex")
        '--allow-regex'
    """
    return python if _options.get() is None else command
