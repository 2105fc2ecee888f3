"""Public names and signatures, one per line, as ``golden_signatures.txt`` holds them.

Run it to write the file again: python tests/golden_signatures.py. The changelog must
then say what changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import treeadapt as ta
import treeadapt.testing

FILE = Path(__file__).with_name("golden_signatures.txt")
API = Path(__file__).parents[1] / "docs" / "api"


def lines() -> Iterator[str]:
    """Yield each public name with its parameters, and the members in the reference."""
    members = documented_members()
    for name in ta.__all__:
        if name != "__version__":
            yield from described(name, getattr(ta, name), members.get(name, ()))
    yield from described("testing.check_adapter", treeadapt.testing.check_adapter)


def documented_members() -> dict[str, list[str]]:
    """Return for each class of the reference the members that it describes."""
    members: dict[str, list[str]] = {}
    name = ""
    pages = (page.read_text("utf-8") for page in sorted(API.glob("*.md")))
    for line in "\n".join(pages).splitlines():
        if heading := re.match(r"\.\. auto\w+:: (\w+)", line):
            name = heading[1]
        elif option := re.match(r" +:(?:special-)?members: (.+)", line):
            members.setdefault(name, []).extend(option[1].split(", "))
    return members


def described(name: str, value: Any, members: Sequence[str] = ()) -> Iterator[str]:
    """Yield one line for a function or a value; for a class also its members."""
    if isinstance(value, type):
        if issubclass(value, BaseException):  # what catches it
            bases = ", ".join(base.__name__ for base in value.__bases__)
            yield f"class {name}({bases})"
            return
        yield f"class {name}{_parameters(value)}"
        fields = getattr(value, "__dataclass_fields__", {})
        public = {field for field in fields if not field.startswith("_")}
        for member in sorted({*public, *members}):
            attribute = inspect.getattr_static(value, member, None)
            function = getattr(attribute, "__func__", attribute)
            called = _parameters(function) if callable(function) else ""
            yield f"  {name}.{member}{called}"
    elif callable(value):
        yield f"{name}{_parameters(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _parameters(function: Any) -> str:
    """Return names, kinds and defaults; types are for type checkers to compare."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()), "utf-8")
