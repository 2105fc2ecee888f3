"""Print the lowest versions that ``setup.cfg`` allows, as constraints for pip.

``setup.cfg`` is the only list: each ``name>=version`` (or ``~=``) becomes
``name==version``. A requirement without a lower bound, or one library with two
different bounds, is an error.

    python .ci/lowest.py > constraints.txt
    pip install --constraint constraints.txt ".[test]"
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

SETUP = Path(__file__).parent.parent / "setup.cfg"
BOUNDED = re.compile(r"([\w-]+) *(?:>=|~=) *([\w.]+)")


def lowest(setup: str) -> dict[str, str]:
    """Read the lowest version of every library that a ``setup.cfg`` names.

    Args:
        setup: text of the file.

    Returns:
        ``{name: version}``, in order of the file.

    Raises:
        ValueError: a requirement has no lower bound, or a library has two.
    """
    config = configparser.ConfigParser()
    config.read_string(setup)
    package = config["metadata"]["name"]
    lists = [
        config["options"]["install_requires"],
        *config["options.extras_require"].values(),
    ]
    found: dict[str, str] = {}
    for requirement in "\n".join(lists).split("\n"):
        if not requirement or requirement.startswith(f"{package}["):
            continue
        bounded = BOUNDED.fullmatch(requirement)
        if not bounded:
            raise ValueError(f"{requirement!r} has no lower bound, such as 'x>=1.2'")
        name, version = bounded.groups()
        if found.setdefault(name, version) != version:
            raise ValueError(f"{name} is bounded by {found[name]} and by {version}")
    return found


if __name__ == "__main__":
    for name, version in lowest(SETUP.read_text("utf-8")).items():
        print(f"{name}=={version}")
