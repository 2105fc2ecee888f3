"""What a terminal shows while work takes long: a bar, or a line.

Nothing is shown for the first second, nor where standard error is no terminal.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import click

from treeadapt.drawing.words import printable

_QUIET_S = 1.0


@contextlib.contextmanager
def progress(label: str, num_steps: int) -> Iterator[Callable[[], None]]:
    """Give a function to call at each step.

    Args:
        label: what is being worked on.
        num_steps: how many steps there are in all.

    Yields:
        The function.
    """
    begun, done = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        bar = None

        def step() -> None:
            nonlocal bar, done
            done += 1
            if bar is not None:
                bar.update(1)
            elif sys.stderr.isatty() and time.monotonic() - begun > _QUIET_S:
                bar = stack.enter_context(
                    click.progressbar(
                        length=num_steps,
                        label=printable(label),
                        file=sys.stderr,
                        show_pos=True,
                    )
                )
                bar.update(done)

        yield step


@contextlib.contextmanager
def patience(text: str) -> Iterator[None]:
    """Show a line while one step takes long, and wipe it afterwards.

    Args:
        text: what is being done.
    """
    if not sys.stderr.isatty():
        yield
        return
    shown = threading.Event()

    def show() -> None:
        shown.set()
        click.echo(f"{printable(text)} ...", err=True, nl=False)

    timer = threading.Timer(_QUIET_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            click.echo("\r\x1b[2K", err=True, nl=False)
