"""The caps that ``SECURITY.md`` states; ``test_untrusted`` holds it to the package."""

from __future__ import annotations

import re
from pathlib import Path

_POLICY = Path(__file__).parent.parent / "SECURITY.md"

#: Number by its words in the table.
CAPS = {
    name: int(number.replace(",", ""))
    for name, number in re.findall(
        r"^\| ([^|]+?) +\| +([\d,]+) \|$",
        _POLICY.read_text("utf-8"),
        flags=re.MULTILINE,
    )
}
