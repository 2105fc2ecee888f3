"""``python -m treeadapt``, and the ``treeadapt`` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: always.
    """
    from treeadapt.cli.commands import main as run

    run()


if __name__ == "__main__":
    main()
