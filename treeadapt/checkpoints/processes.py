"""Steps that the processes of one program take together.

All processes run the same block of code; if it fails in one of them, it raises in all,
so that none goes on alone or waits for the others forever. They talk through the
coordination service of ``jax.distributed``, not through devices: a process that failed
inside another library can still say so, and nothing is compiled. A program of one
process just runs the block.

JAX ends all processes when one dies: at once when it is process 0, otherwise after
``heartbeat_timeout_seconds`` of ``jax.distributed.initialize``.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from treeadapt.errors import CheckpointError, TreeAdaptError
from treeadapt.text.names import listing, shorten
from treeadapt.trees import _jax
from treeadapt.trees.arrays import is_array

_ARRIVAL_S = 300  # as Orbax 0.12: _DEFAULT_BARRIER_TIMEOUT of its multihost
_WORK_S = 24 * 3600  # for processes that all came; the dead are noticed before
_SHOWN = 3
_rounds = itertools.count()  # the same everywhere, because all make the same calls


def spans_processes(leaf: Any) -> bool:
    """Return whether a leaf is, or is to be, on devices of several processes."""
    if not is_array(leaf) or isinstance(leaf, jax.core.Tracer):
        return False
    sharding = getattr(leaf, "sharding", None)
    try:
        return sharding is not None and not sharding.is_fully_addressable
    except ValueError:  # an AbstractMesh has no devices
        return False


@contextlib.contextmanager
def agreed(call: str) -> Iterator[Callable[[str], str]]:
    """Run a block in all processes; if it fails in any, raise in all.

    Blocks follow each other in the same order everywhere and are not nested.

    Args:
        call: what all processes call, such as ``"save to 'model'"``.

    Yields:
        Function that gives to all processes the text that process 0 calls it with.

    Raises:
        CheckpointError: the block failed in some processes, or not all of them came.
        TreeAdaptError: it failed in all of them for the same reason, which this is.
    """
    if jax.process_count() == 1:
        yield str
        return
    meeting = _Meeting(call)
    meeting.start()
    failure = None
    try:
        yield meeting.told
    except BaseException as error:  # noqa: BLE001 - the others wait whatever it is
        failure = error
        meeting.fail(error)
    meeting.wait("end", _WORK_S)
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    meeting.resolve(failure)


class _Meeting:
    """One block that all processes run, and what they say of it."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._key = f"treeadapt/{next(_rounds)}"
        self._first = f"{self._key}/first"
        self._follows = False  # whether only process 0 failed, which then says why
        self._has_told = False  # whether process 0 told what the others wait for
        self._client = _jax.coordination_client()
        if self._client is None:
            raise CheckpointError(
                f"Several processes {call}, and they cannot talk to each other. Call "
                "jax.distributed.initialize() at the start of the program."
            )

    def start(self) -> None:
        """Wait until all processes are here, and raise unless all call the same."""
        calls = f"{self._key}/calls"
        digest = f"{zlib.crc32(self._call.encode()):08x}"  # one entry if all are equal
        text = f"process {jax.process_index()}: {self._call}"
        with self._talking():
            self._client.key_value_set(f"{calls}/{digest}", text, allow_overwrite=True)
            self.wait("start", _ARRIVAL_S)
            texts = sorted(text for _, text in self._client.key_value_dir_get(calls))
        if len(texts) > 1:
            raise CheckpointError(
                f"Processes make different calls ({'; '.join(texts[:_SHOWN])}). All of "
                "them must make the same calls in the same order."
            )

    def wait(self, point: str, limit_s: int) -> None:
        """Wait until all processes are at a point of the block."""
        with self._talking():
            self._client.wait_at_barrier(f"{self._key}/{point}", limit_s * 1000)

    def told(self, text: str) -> str:
        """Return the text of process 0 in all processes."""
        if jax.process_index() == 0:
            data = zlib.compress(text.encode("utf-8", "surrogatepass"))
            self._client.key_value_set_bytes(self._first, data)
            self._has_told = True
            return text
        with self._talking():
            wait_ms = _WORK_S * 1000
            data = self._client.blocking_key_value_get_bytes(self._first, wait_ms)
        if not data:  # no compressed text is empty: see ``fail``
            self._follows = True
            raise CheckpointError("Process 0 failed.")
        return zlib.decompress(data).decode("utf-8", "surrogatepass")

    def fail(self, error: BaseException) -> None:
        """Say why this process cannot go on."""
        if self._follows:
            return
        text, process = str(error), jax.process_index()
        if not isinstance(error, TreeAdaptError):
            text = f"{type(error).__name__}: {text}"
        text = shorten(text, limit=3000).encode("utf-8", "replace").decode()
        self._client.key_value_set(f"{self._key}/failed/{process}", text)
        if process == 0 and not self._has_told:  # others wait for what it would tell
            self._client.key_value_set_bytes(self._first, b"", allow_overwrite=True)

    def resolve(self, failure: Exception | None) -> None:
        """Raise what all processes raise, if the block failed in any."""
        with self._talking():
            failures = self._client.key_value_dir_get(f"{self._key}/failed")
        texts = {int(key.rpartition("/")[2]): text for key, text in failures}
        count = jax.process_count()
        if not texts:
            if jax.process_index() == 0:  # nothing is read any more but "failed"
                self._client.key_value_delete(self._key)
            return
        if failure is not None and len(texts) == count and len({*texts.values()}) == 1:
            raise failure
        first, *others = sorted(texts)
        also = listing([str(one) for one in others], limit=_SHOWN)
        raise CheckpointError(
            f"Process {first} of {count} failed, so none goes on. {texts[first]}"
            + f" Also failed: {also}." * bool(others)
        ) from failure

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            problem = shorten(" ".join(str(error).split()), limit=500)
            raise CheckpointError(
                f"Not all processes got through {self._call!r}: one did not come "
                f"within {_ARRIVAL_S} s, or died. All must make the same call. JAX "
                f"says: {problem}"
            ) from error
