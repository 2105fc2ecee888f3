"""Shared arguments: what a file writes once for the optimizers of all its labels.

Takes the table ``[each]`` and those of ``[optimizers]``; gives these with what each
takes of it, and says what it may not hold, and what none takes. A table of its own
says otherwise; only what has a ``type`` there, in lists too, takes arguments, and
nothing inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treeadapt.optimizers.building import ALSO, EACH, Fault
from treeadapt.optimizers.factories import Factory
from treeadapt.text.names import Speller, listing

# Groups exist in order to differ in these, and in which leaves they select.
_OF_ONE_GROUP = ("type", "inject", "given", "learning_rate", "weight_decay")


def with_shared(
    table: Any, each: Mapping[str, Any], factories: Mapping[str, Factory]
) -> Any:
    """Return a table of ``[optimizers]``, or a list, with what it takes of ``[each]``.

    Args:
        table: as the file has it.
        each: arguments by name.
        factories: what a table may name.
    """
    if isinstance(table, list):
        return [with_shared(item, each, factories) for item in table]
    factory = _factory(table, factories)
    return {**table, **factory.shared(each, table)} if factory else table


def shared_faults(
    tables: Mapping[str, Any],
    each: Mapping[str, Any],
    factories: Mapping[str, Factory],
) -> Iterator[Fault]:
    """Yield what ``[each]`` may not hold, and what no table takes of it.

    Args:
        tables: ``[optimizers]``, by label.
        each: arguments by name.
        factories: what a table may name.
    """
    calls = [*_calls([*tables.values()])]
    factory_of = [_factory(table, factories) for table in calls]
    arguments = {name: 0 for x in factory_of if x for name in x.arguments}
    taken = {
        name
        for factory, table in zip(factory_of, calls, strict=True)
        for name in (factory.shared(each, table) if factory else ())
    }
    for name in each:
        near = ALSO.get(name) or Speller().best(name, arguments)
        if name.endswith("mask") or {name, near} & {*_OF_ONE_GROUP}:
            text = "groups differ in it; write it in the tables of [optimizers]"
        elif name in taken or None in factory_of:  # a type that has a fault of its own
            continue
        elif name in arguments:
            text = "each table that has it gives a value of its own; remove it"
        elif not calls:
            text = "there is no table in [optimizers] that could take it"
        else:
            text = "no table of [optimizers] has such an argument; "
            text += (
                f"did you mean {near!r}?" if near else f"known: {listing(arguments)}"
            )
        yield Fault((EACH, name), text)


def _calls(tables: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the tables with a ``type``, those of lists too."""
    for table in tables:
        if isinstance(table, list):
            yield from _calls(table)
        elif isinstance(table, dict) and "type" in table:
            yield table


def _factory(table: Any, factories: Mapping[str, Factory]) -> Factory | None:
    name = table.get("type") if isinstance(table, dict) else None
    return factories.get(name) if isinstance(name, str) else None
