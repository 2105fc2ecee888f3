"""The ``treeadapt`` command, run in the process of the tests."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from treeadapt.cli.commands import app

COMMANDS = tuple(app.commands)


def invoke(*arguments: Any, **options: Any) -> Result:
    """Run the command; the result has its exit code and both outputs."""
    texts = [*map(str, arguments)]
    return CliRunner().invoke(app, texts, prog_name="treeadapt", **options)


def run(*arguments: Any, code: int = 0) -> str:
    """Run the command, which must end with ``code``; its output, or its error."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.stderr
