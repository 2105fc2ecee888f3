"""Elements of SVG and HTML, built one below the other so that every text is escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET


def element(
    into: ET.Element, tag: str, text: str = "", **attributes: str | float
) -> ET.Element:
    """Add an element below another.

    Args:
        into: the one above.
        tag: its name.
        text: what it holds.
        attributes: ``class_`` is ``class``, ``fill_opacity`` is ``fill-opacity``; an
            empty text is left out, and a number has two decimals at most.

    Example:
        >>> root = ET.Element("g")
        >>> made = element(root, "text", "a < b", x=1.0, class_="end", fill_opacity=0.5)
        >>> ET.tostring(root, encoding="unicode")
        '<g><text x="1" class="end" fill-opacity="0.5">a &lt; b</text></g>'
    """
    child = ET.SubElement(into, tag)
    child.text = text
    for name, value in attributes.items():
        if value != "":
            written = value if isinstance(value, str) else px(value)
            child.set(name.rstrip("_").replace("_", "-"), written)
    return child


def px(number: float) -> str:
    """Write a number with two decimals at most.

    Example:
        >>> px(2.0), px(0.125), px(-0.001)
        ('2', '0.12', '0')
    """
    text = f"{number:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
