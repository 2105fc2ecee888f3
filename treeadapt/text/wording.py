"""Advice in the words of who reads it: arguments of Python, or options of the command.

What writes a message knows both and says both; which is shown is decided here, once.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

# The caller cannot hand it over: a message is written many rooms below the command.
_is_command = contextvars.ContextVar("is_command", default=False)


@contextlib.contextmanager
def command_words() -> Iterator[None]:
    """Word advice as the command takes it, inside of this."""
    token = _is_command.set(True)
    try:
        yield
    finally:
        _is_command.reset(token)


def worded(python: str, command: str) -> str:
    """Return one of two wordings of the same advice.

    Example:
        >>> worded("allow_regex=True", "--allow-regex")
        'allow_regex=True'
        >>> with command_words():
        ...     worded("allow_regex=True", "--allow-regex")
        '--allow-regex'
    """
    return command if _is_command.get() else python
