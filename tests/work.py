"""What a call costs: the functions that it enters, and the programs it compiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax

import treeadapt as ta

_PACKAGE = str(Path(ta.__file__).parent)


def calls_in(run: Callable[[], Any]) -> int:
    """Return how many functions of treeadapt are called; no clock is asked."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


_recorders: list[list[tuple[Any, str]]] = []


@contextlib.contextmanager
def recorded_programs() -> Iterator[list[tuple[Any, str]]]:
    """Record what ``jax.jit`` makes inside the block, each time that it is called.

    What was made before is not recorded, so give it shapes that no other test has.

    Yields:
        Pairs of a function and the text of its compiled program, once it is called.
    """
    programs: list[tuple[Any, str]] = []
    jit = jax.jit

    def recording(fn: Any, **options: Any) -> Any:
        compiled = jit(fn, **options)

        def run(*args: Any) -> Any:
            if _recorders:
                text = compiled.lower(*args).compile().as_text()
                _recorders[-1].append((compiled, text))
            return compiled(*args)

        return run

    _recorders.append(programs)
    jax.jit = recording
    try:
        yield programs
    finally:
        jax.jit = jit
        _recorders.remove(programs)
