"""URLs of checkpoints, which are never written with what opens a store to others.

``Url`` holds a URL and is the only thing that writes it: without user and password,
query and, on the web, fragment. ``said_by`` gives what another library says of it,
unless one of these may be in there: its text is then left out, not cut.
"""

from __future__ import annotations

import dataclasses
from pathlib import PurePosixPath
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

_WEB = ("http", "https")


@dataclasses.dataclass(frozen=True, order=True, repr=False)
class Url:
    """The URL of a file or folder.

    Attributes:
        base: what is before ``query``.
        query: from ``?`` on, which other files of the folder are asked for with, too;
            on the web from ``#`` on, which is in names of stores of objects.

    Example:
        >>> url = Url.of("https://me:pass@word@host/run?token=a'b c")
        >>> url / "model.safetensors"
        https://host/run/model.safetensors
        >>> url.said_by(OSError("no token: a'b%20c")), url.said_by(OSError("closed"))
        ('OSError', 'OSError: closed')
    """

    base: str
    query: str

    @classmethod
    def of(cls, text: str) -> Url:
        """Return the URL that a text is."""
        is_web = text.partition("://")[0].lower().endswith(_WEB)
        end = min((f"{text}?#").find(mark) for mark in ("?#" if is_web else "?"))
        return Url(text[:end], text[end:])

    def __str__(self) -> str:
        scheme, mark, rest = self.base.partition("://")
        if not self._is_clear:
            return f"{scheme}{mark}..."
        netloc, slash, path = rest.partition("/")
        return f"{scheme}{mark}{netloc.rpartition('@')[2]}{slash}{path}"

    __repr__ = __fspath__ = __str__

    def __truediv__(self, name: str) -> Self:
        return dataclasses.replace(self, base=f"{self.base.rstrip('/')}/{name}")

    @property
    def full(self) -> str:
        """The URL as it is: to ask for, and never for a message."""
        return f"{self.base}{self.query}"

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server."""
        return self.base.partition("://")[0].lower().endswith(_WEB)

    @property
    def name(self) -> str:
        """The last segment."""
        return self.base.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        """The folder that it is in."""
        return dataclasses.replace(self, base=self.base.rstrip("/").rpartition("/")[0])

    def said_by(self, error: BaseException) -> str:
        """Return the class of an error, and what it says if no secret can be in it.

        Of an answer with a status these are said instead. Servers lead to other URLs
        that have secrets of their own, so of the web nothing is said that has a URL.
        """
        status = f"{getattr(error, 'status', '')} {getattr(error, 'message', '')}"
        for text in (" ".join(str(error).split()), status.strip()):
            if text and self._is_open(text):
                return f"{type(error).__name__}: {text}"
        return type(error).__name__

    @property
    def _is_clear(self) -> bool:
        """Whether it is known where a password in it ends.

        It is not with a slash in a password, nor in ``zip://a::https://me:word@host``.
        """
        rest = self.base.partition("://")[2]
        try:
            urlsplit(f"//{rest}").port  # noqa: B018 - raises where there is none
        except ValueError:
            return "@" not in self.full and "://" not in rest  # such as the ARN of AWS
        return "://" not in rest

    def _is_open(self, text: str) -> bool:
        """Return whether a text can be shown."""
        if not self._is_clear:
            return False
        login = urlsplit(f"//{self.base.partition('://')[2]}")
        rest = urlsplit(self.query)
        values = (value for _, value in parse_qsl(rest.query))
        parts = (login.username, login.password, rest.query, rest.fragment, *values)
        secrets = [*filter(None, map(_letters, filter(None, parts)))]
        if (self.is_web or secrets) and ("://" in text or "?" in text):
            return False
        return not any(secret in _letters(text) for secret in secrets)


def is_url(text: object) -> bool:
    """Return whether a text is a URL."""
    return isinstance(text, str) and "://" in text


def shown(name: str) -> str:
    """Return the name of a checkpoint as it can be shown.

    Example:
        >>> shown("https://me:word@host/x?token=abc"), shown("what?.npz")
        ('https://host/x', 'what?.npz')
    """
    return str(Url.of(name)) if is_url(name) else name


def _letters(text: str) -> str:
    """Return a text without what libraries write in several ways."""
    return "".join(filter(str.isalnum, unquote(unquote(text))))
