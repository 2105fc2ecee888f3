"""``python -m treeadapt``, and the ``treeadapt`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; say how to get it where its library is missing.

    Raises:
        SystemExit: always.
    """
    try:
        from treeadapt.cli.commands import main as run
    except ImportError as error:
        if error.name != "click":
            raise
        sys.exit(f'error: the command needs {error.name}: pip install "treeadapt[cli]"')
    run()


if __name__ == "__main__":
    main()
