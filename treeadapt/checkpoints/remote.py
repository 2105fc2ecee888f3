"""Checkpoints in object stores and on web servers, read by ranges with fsspec.

``RemotePath`` has the methods of ``pathlib.Path`` that this room calls, so that the
readers of formats take both. ``fetch`` makes requests: up to 16 at a time and of so
many bytes together. One that fails is made again three times; one in which nothing
comes for a while is made again for half of its range. See ``url`` for what is shown.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import fnmatch
import functools
import io
import itertools
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from treeadapt.checkpoints.errors import named_path, refuse
from treeadapt.checkpoints.url import Url, shown
from treeadapt.errors import CheckpointError
from treeadapt.text.names import listing, shorten

MAX_INFLIGHT_BYTES = 2**31
REQUESTS = 16
_REQUEST_BYTES = 2**18, 2**24  # of one request: what is not split, and what is
_GAP_BYTES = 2**18  # up to which it is read over, next to a range that is smaller
HEAD_BYTES = 512  # of each file, which say what it is
_SILENCE_S = 30  # without a byte from a web server
_LIMIT_S = 120  # of a request to a store of which one does not see the bytes come
_WAITS_S = (0.1, 0.5, 2.0)  # before a request is made again
_HUB = "hf"  # of Hugging Face, as in ``hf://org/name@revision``
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_COLLAPSED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/[^/]")  # what ``Path`` makes of it
# Web servers list no folders, so these are tried there.
_TRIED = (
    *("model.safetensors.index.json", "model.safetensors", "_METADATA"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
# What stores say of a file, of which some changes when another comes to its place.
_VERSION = ["size", "ETag", "etag", "generation", "mtime", "LastModified", "updated"]
_VERSION += ["last_modified", "Last-Modified", "created", "VersionId", "Content-MD5"]
_VERSION += ["blob_id"]  # of the Hugging Face Hub
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclasses.dataclass
class _Store:
    """What the paths of one checkpoint share.

    Attributes:
        fs: of fsspec.
        read_options: with which its files are opened to read a range.
        max_bytes: of all requests that were made and are not used yet.
        range_bytes: of one request; less after requests in which nothing came.
        slots: for requests at the same time.
        facts: what is known of files, by URL; None of one that is not there.
        heads: how files start, by URL.
    """

    fs: Any
    read_options: Mapping[str, str]
    max_bytes: int
    range_bytes: int
    slots: threading.BoundedSemaphore
    facts: dict[str, dict[str, Any] | None]
    heads: dict[str, bytes]


@dataclasses.dataclass(frozen=True, order=True, repr=False)
class RemotePath(Url):
    """A file or folder in an object store, with the methods of a path that are used.

    Attributes:
        store: where it is.
    """

    store: _Store = dataclasses.field(compare=False)

    def exists(self) -> bool:
        """Return whether there is a file or folder."""
        return self.facts() is not None or self.is_dir()

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return (self.facts() or {}).get("type") == "file"

    def is_dir(self) -> bool:
        """Return whether it is a folder; on the web, of files that are tried."""
        if self.is_web:
            return not self.is_file() and any(self.iterdir())
        return (self.facts() or {}).get("type") == "directory"

    def stat(self) -> SimpleNamespace:
        """Return the size alone."""
        size_bytes = (self.facts() or {}).get("size")
        if type(size_bytes) is not int:
            refuse(self, "its server does not say how large it is")
        return SimpleNamespace(st_size=size_bytes)

    def stamp(self, *, again: bool = False) -> tuple[str, ...]:
        """Return what changes when another file comes; asked for again, or as known."""
        facts = self.facts(again=again) or {}
        if facts.get("type") == "directory":
            return ()
        return tuple(f"{key} {facts[key]}" for key in _VERSION if key in facts)

    def facts(self, *, again: bool = False) -> dict[str, Any] | None:
        """Return what its store says of it; None if it is not there."""
        if again or self.full not in self.store.facts:
            fs, known = self.store.fs, None

            def asked_anew() -> dict[str, Any]:
                fs.invalidate_cache(fs._strip_protocol(self.full))
                facts: dict[str, Any] = self._call("info")
                return facts

            with contextlib.suppress(FileNotFoundError):
                known = self._asked(asked_anew)
            self.store.facts[self.full] = known
        return self.store.facts[self.full]

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is in the folder; on the web, of files that are tried."""
        if self.is_web:
            yield from filter(RemotePath.is_file, map(self.__truediv__, _TRIED))
            return
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = self._asked(lambda: self._call("ls", detail=False))
        for name in sorted({each.rstrip("/").rpartition("/")[2] for each in names}):
            yield self / name

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield what is in the folder, or a file in the folders in it."""
        first, _, file = pattern.partition("/")
        entries = [x for x in self.iterdir() if fnmatch.fnmatchcase(x.name, first)]
        if not file:
            yield from entries
        elif not self.is_web:
            files = [each / file for each in entries]
            yield from itertools.compress(files, mapped(RemotePath.is_file, files))

    def open(self, _mode: str) -> io.BytesIO:
        """Read the whole file, and open what was read."""
        return io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        """Read the whole file."""
        return self.read(0, self.stat().st_size)

    def read_text(self, encoding: str) -> str:
        """Read the whole file."""
        return self.read_bytes().decode(encoding)

    def head(self) -> bytes:
        """Return how the file starts."""
        if self.full not in self.store.heads:
            stop = min(HEAD_BYTES, self.stat().st_size)
            self.store.heads[self.full] = self.requested(0, stop) if stop else b""
        return self.store.heads[self.full]

    def read(self, start: int, stop: int) -> bytes:
        """Read a range."""
        head = self.head()[start:stop] if start < HEAD_BYTES else b""
        rest = [(self, start + len(head), stop)] if start + len(head) < stop else []
        pieces = fetch(rest, self.store.max_bytes // 2)
        return b"".join([head, *(data for _, _, data in pieces)])

    def requested(self, start: int, stop: int) -> bytes:
        """Read a range by one request, or by more where so many bytes do not come."""
        parts: list[bytes] = []
        least, _ = _REQUEST_BYTES
        while start < stop:
            end = min(stop, start + self.store.range_bytes)
            is_long = end - start > least
            read = functools.partial(self._range, start, end)
            try:
                parts.append(self._asked(read, TimeoutError if is_long else ()))
                start = end
            except TimeoutError:
                # Many requests share one line: of less, the first byte comes sooner.
                half = max(least, (end - start) // 2)
                self.store.range_bytes = min(self.store.range_bytes, half)
        return b"".join(parts)

    def _range(self, start: int, stop: int) -> bytes:
        """Make one request for a range."""
        data: bytes
        if self.is_web:
            data = self._sync(_web_range, self.store.fs, self.full, start, stop)
        else:
            options = self.store.read_options
            data = self._call("cat_file", start=start, end=stop, **options)
        if len(data) != stop - start:
            raise OSError(f"{len(data):,} of {stop - start:,} bytes came")
        return data

    def _call(self, method: str, **options: Any) -> Any:
        """Call a method of fsspec, within the time limit where that can be done."""
        fs = self.store.fs
        path = fs._strip_protocol(self.full)
        if not fs.async_impl:
            return getattr(fs, method)(path, **options)

        async def limited() -> Any:
            # Unlike the limit of ``sync``, this one ends the request, too.
            call = getattr(fs, f"_{method}")(path, **options)
            return await asyncio.wait_for(call, _LIMIT_S)

        return self._sync(limited)

    def _sync(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a coroutine, in the thread of fsspec."""
        from fsspec.asyn import sync

        return sync(self.store.fs.loop, call, *arguments)

    def _asked(self, call: Callable[[], _T], passed: Any = ()) -> _T:
        """Return what a request gives, made again where it fails.

        Args:
            call: makes it.
            passed: exceptions that are not for here.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it failed each time.
        """
        failure: BaseException
        for wait_s in (*_WAITS_S, None):
            try:
                with self.store.slots:
                    return call()
            except passed:
                raise
            except Exception as error:  # noqa: BLE001 - of any library below fsspec
                failure = error
            if self.is_web and isinstance(failure, FileNotFoundError):
                # fsspec's ``info`` raises it whatever a web server says; what it was
                # raised from says more (filesystem_spec#873).
                cause = failure.__cause__
                if cause and getattr(cause, "status", None) not in (404, 410):
                    failure = cause
            is_final = isinstance(failure, FileNotFoundError | PermissionError)
            if is_final or wait_s is None:
                break
            _pause(wait_s)
        if isinstance(failure, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "not there", str(self)) from None
        text = shorten(self.said_by(failure), limit=300)
        if isinstance(failure, TimeoutError):
            text = f"in {_SILENCE_S if self.is_web else _LIMIT_S:g} s nothing came. "
            text += "Pass a smaller max_inflight_bytes=, for fewer requests at a time."
        times = " each time" * (not is_final)
        raise CheckpointError(
            f"The checkpoint {listing([str(self)])} cannot be read. The request "
            f"failed{times}: {text}"
        ) from None


async def _web_range(fs: Any, url: str, start: int, stop: int) -> bytes:
    """Ask a web server for a range, and compare what it says that it sends.

    fsspec 2026.9 takes whatever comes, and limits the time of the whole request.

    Raises:
        OSError: it is not that range.
        TimeoutError: nothing came for a while.
    """
    import aiohttp

    limit = aiohttp.ClientTimeout(None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
    options = {"timeout": limit, **fs.kwargs}
    ranged = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    options["headers"] = {**options.get("headers", {}), **ranged}
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), **options) as response:
        fs._raise_not_found_for_status(response, url)
        sent = response.headers.get("Content-Range", "")
        size_bytes = response.content_length
        if response.status == 206 and sent.startswith(f"bytes {start}-{stop - 1}/"):
            return bytes(await response.read())
        if response.status == 200 and (start, stop) == (0, size_bytes):
            return bytes(await response.read())
    if response.status == 200:
        raise OSError(
            "its server sends whole files and no ranges. Download it and load the "
            "file, or ask a server that sends ranges, such as nginx"
        )
    raise OSError(
        f"its server was asked for bytes {start}-{stop - 1} and answered with "
        f"{sent or 'others, which it does not name'}. Download it and load the file"
    )


#: What this room reads from.
AnyPath: TypeAlias = Path | RemotePath


class _Ranges(io.RawIOBase):
    """A remote file of which what is asked for is read, and no more."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._place}
        if whence == os.SEEK_END:
            starts[whence] = self._path.stat().st_size
        self._place = max(0, starts[whence] + place)
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._path.stat().st_size)
        data = self._path.read(self._place, stop) if self._place < stop else b""
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def opened_ranges(path: AnyPath) -> IO[bytes]:
    """Open a file to read parts of it, of which a remote one is asked for."""
    if isinstance(path, RemotePath):
        return io.BufferedReader(_Ranges(path), _GAP_BYTES)
    return path.open("rb")


def read_range(path: AnyPath, start: int, stop: int) -> bytes:
    """Read a range of a file, less of it if the file ends before."""
    if isinstance(path, RemotePath):
        return path.read(start, min(stop, path.stat().st_size))
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def checkpoint_path(path: Any, max_inflight_bytes: int = MAX_INFLIGHT_BYTES) -> AnyPath:
    """Return the path that the caller gives, which may be a URL.

    Raises:
        CheckpointError: it is neither, or what reads from its store is not installed.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    scheme = _SCHEME.match(text)
    if not scheme:
        collapsed = None if isinstance(path, str) else _COLLAPSED.match(text)
        if collapsed:
            cure = f"Pass the text {collapsed[1]}://..., which Path changes."
            refuse(text, "there is no such folder", cure)
        if "://" in text:
            seen, cure = "it is not a URL that is read here", "Name one such as s3://"
            refuse(shown(text), seen, cure)
        return named_path(path)
    url = Url.of(text)
    if scheme[1].lower() == "file":
        return named_path(url2pathname(urlsplit(text).path))
    if type(max_inflight_bytes) is not int or max_inflight_bytes < 1:
        raise CheckpointError(
            f"max_inflight_bytes={max_inflight_bytes!r:.60} is not an integer above 0."
        )
    kind = scheme[1].lower()
    # What a listing says of a file is not what is said of the file alone; of the Hub it
    # is more. There, files are read ahead of what is asked for, by 5 MiB each time, as
    # huggingface_hub 0.36 opens them.
    options = {} if kind == _HUB else {"use_listings_cache": False}
    read_options = {"cache_type": "none"} if kind == _HUB else {}
    failure: Exception | None = None
    try:
        from fsspec.core import url_to_fs

        try:
            fs, _ = url_to_fs(text, **options)
        except TypeError:  # of a store that takes no such option
            fs, _ = url_to_fs(text)
    except Exception as error:  # noqa: BLE001 - of any library below fsspec
        failure = error
    if failure:  # here, because no traceback shows what it was raised in, then
        cure = ""
        if isinstance(failure, ImportError | ValueError):
            extra = "hub" if kind == _HUB else "remote"
            cure = f'Install what reads it, pip install "treeadapt[{extra}]"'
            cure += ", with gcsfs for gs:// and s3fs for s3://" * (kind != _HUB)
            cure += "; or download it."
        refuse(url, url.said_by(failure).rstrip("."), cure)
    slots = threading.BoundedSemaphore(REQUESTS)
    _, range_bytes = _REQUEST_BYTES
    store = _Store(fs, read_options, max_inflight_bytes, range_bytes, slots, {}, {})
    return RemotePath(url.base, url.query, store)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def mapped(function: Callable[[_T], _R], paths: Iterable[_T]) -> Iterable[_R]:
    """Call a function of paths, at the same time where these are remote."""
    paths = [*paths]
    if not any(isinstance(each, RemotePath) for each in paths):
        return map(function, paths)
    with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(function, paths))


def joined(ranges: Iterable[tuple[Any, int, int]]) -> list[tuple[RemotePath, int, int]]:
    """Return ranges with those as one that follow each other, or nearly so.

    What is between two is read too where one of them is small, because a request takes
    longer.

    Args:
        ranges: in the order in which they are in files.
    """
    pieces: list[tuple[RemotePath, int, int]] = []
    for path, start, stop in ranges:
        before, first, last = pieces[-1] if pieces else (None, 0, 0)
        is_small = min(stop - start, last - first) < _REQUEST_BYTES[0]
        if path == before and 0 <= start - last <= (_GAP_BYTES if is_small else 0):
            pieces[-1] = path, first, stop
        else:
            pieces.append((path, start, stop))
    return pieces


def fetch(
    pieces: Sequence[tuple[RemotePath, int, int]], max_bytes: int
) -> Iterator[tuple[RemotePath, int, bytes]]:
    """Yield ranges in order, read by several requests at a time.

    Args:
        pieces: path, start and stop of each; a large one comes in parts.
        max_bytes: how much may be read before it is used.

    Yields:
        Path, start and content.
    """
    least, most = _REQUEST_BYTES
    step = min(max(max_bytes // REQUESTS, least), most)
    left = deque(
        (path, place, min(place + step, stop))
        for path, start, stop in pieces
        for place in range(start, stop, step)
    )
    pending: deque[tuple[RemotePath, int, int, Any]] = deque()
    pool = concurrent.futures.ThreadPoolExecutor(min(REQUESTS, len(left) or 1))
    try:
        free = max_bytes
        while left or pending:
            while left and len(pending) < 2 * REQUESTS:
                path, start, stop = left[0]
                if pending and stop - start > free:
                    break
                left.popleft()
                free -= stop - start
                request = pool.submit(path.requested, start, stop)
                pending.append((path, start, stop, request))
            path, start, stop, request = pending.popleft()
            yield path, start, request.result()
            free += stop - start
            del request
    finally:
        pool.shutdown(cancel_futures=True)


class Stream:
    """In the place of a file, gives what was fetched, in the order of the ranges."""

    def __init__(self, pieces: Iterator[tuple[RemotePath, int, bytes]]) -> None:
        self.path: Any = None
        self._pieces = pieces
        self._piece: tuple[Any, int, bytes] = (None, 0, b"")
        self._place = 0

    def seek(self, place: int) -> None:
        """Go to a place of ``path``, after those that were read before."""
        self._place = place

    def readinto(self, buffer: Any) -> int:
        """Fill the start of a buffer."""
        path, start, data = self._piece
        while path != self.path or not start <= self._place < start + len(data):
            path, start, data = self._piece = next(self._pieces)
        part = memoryview(data)[self._place - start :][: len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)
