"""Building: tables of a file, each a call of a factory, made into transformations.

Takes plain data and names that have values; gives transformations and schedules. A
table with ``type`` is a call, ``{given = "name"}`` alone a named value, any other is
data; the argument decides how a value is read. What is wrong is noted with its place in
the file and reading goes on, so that one run finds everything. Values that nobody gives
leave a call unmade.
See ``factories`` for what may be called, ``load`` for the whole file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from treeadapt.arrays import is_array, is_number
from treeadapt.data_files import one_line
from treeadapt.errors import TreeAdaptError
from treeadapt.names import Speller, listing, shorten
from treeadapt.optimizers.factories import (
    LARGEST,
    PARTITION,
    REFUSED,
    SCHEDULE,
    TRANSFORMATION,
    Argument,
    Factory,
    factories,
)
from treeadapt.selection.files import RULES_FILE, check_patterns, read_stacks
from treeadapt.selection.rules import Rules
from treeadapt.selection.selectors import Selector, as_selector
from treeadapt.transforms.adapt import is_transformation, with_extra_args
from treeadapt.transforms.hyperparams import inject_hyperparams

MAX_DEPTH = 32
MAX_VALUES = 10_000  # that are read; a named one each time that it is used
MAX_BOUNDARIES = 1_000
_MAX_NUMBER = 1e38  # float32 holds 3.4e38

#: What stands for a value that is wrong, or that nobody gives.
NOTHING = type("Nothing", (), {"__repr__": lambda self: "NOTHING"})()

# What other programs call arguments.
_ALSO = {
    "lr": ("learning_rate",),
    "wd": ("weight_decay",),
    "betas": ("b1", "b2"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "epsilon": ("eps",),
    "name": ("type",),
    "_target_": ("type",),
}
_TABLE = '{ type = "adamw", learning_rate = 1e-3 }'
_EXAMPLES = {
    TRANSFORMATION: _TABLE,
    SCHEDULE: '{ type = "constant_schedule", value = 1e-3 }',
    "bool": "true or false",
    "mask": '"**/kernel", or a list: ["**", "!**/bias"]',
    "dtype": '"bfloat16" or "float32"',
    "axes": '{ "**/kernel" = { output_axis = 1 }, "**" = "none" }',
    "factors": '{ "blocks/0" = 0.1, "**" = 1.0 }',
    "text": "a text in quotes",
}
_RATES = ("learning_rate", "step_size", "step_size_fn")
_INJECTED = ("number", "rate")  # kinds that a state can hold
_AXIS = Argument("whole", least=None, most=64)


@dataclasses.dataclass(frozen=True)
class Selection:
    """What selects leaves inside an optimizer: a mask, or a table of patterns.

    Attributes:
        place: where the file says it.
        label: of the leaves that are trained there; "" for all that are not frozen.
        where: the selector, or rules whose values are axes or factors.
        patterns: as typed.
    """

    place: str
    label: str
    where: Selector | Rules
    patterns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rate:
    """A rate of an optimizer.

    Attributes:
        place: where the file says it.
        label: of the leaves that are trained there; "" for all that are not frozen.
        data: as the file has it.
        value: a number, a schedule, or ``NOTHING``.
    """

    place: str
    label: str
    data: Any
    value: Any


class TooMuchError(Exception):
    """A file asks for more than is read; the text says of what."""


class Builder:
    """Builds transformations, and notes what is wrong.

    Args:
        named: values with a name; texts, numbers, lists and tables are data.
        factories_of_caller: in addition to Optax's.
        stacks: those of the file.
        allow_regex: accept ``re:`` patterns.

    Attributes:
        findings: what is wrong, each with its place.
        lacking: names that nobody gives, and where the first use of each is.
        selections: masks and tables of patterns.
        rates: those of the file.
        partition: makes what ``partition`` means in the file; None without labels.
        num_partitions: how often the file says that.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        factories_of_caller: Mapping[str, Factory],
        stacks: Any,
        *,
        allow_regex: bool,
    ):
        self.factories = {**factories(), **factories_of_caller}
        self._named, self._file_stacks = named, stacks
        self._allow_regex = allow_regex
        self._label = ""
        self._within: list[str] = []  # names whose values are being read
        self._depth = self._num_read = self._num_found = self.num_partitions = 0
        self.findings: dict[str, None] = {}
        self.lacking: dict[str, str] = {}
        self.selections: list[Selection] = []
        self.rates: list[Rate] = []
        self.partition: Callable[[], Any] | None = None

    def build(self, data: Any, place: str, label: str = "") -> Any:
        """Return the transformation of a table or a list; ``NOTHING`` if none is made.

        Args:
            data: the table.
            place: its name in the file.
            label: whose optimizer it is; "" for what is around all.

        Raises:
            TooMuchError: more is read than one file may ask for.
        """
        self._label = label
        return self._read(Argument(TRANSFORMATION), data, place)

    def find(self, place: str, text: str) -> Any:
        """Note what is wrong at a place."""
        self._num_found += 1
        self.findings[f"{place}: {text}" if place else text] = None
        return NOTHING

    def _read(self, argument: Argument, data: Any, place: str) -> Any:
        """Read a value as its argument asks; ``NOTHING`` if that cannot be done."""
        self._num_read += 1
        self._depth += 1
        if self._num_read > MAX_VALUES:
            raise TooMuchError(f"it has more than {MAX_VALUES:,} values")
        if self._depth > MAX_DEPTH:
            raise TooMuchError(
                f"{shorten(place)}: it is nested deeper than {MAX_DEPTH}"
            )
        try:
            if isinstance(data, dict) and data.keys() == {"given"}:
                return self._read_named(argument, data["given"], place)
            if data is None or (isinstance(data, str) and data == "none"):
                if argument.allows_none:
                    return None
                return self.find(place, f"it cannot be none{_example(argument)}")
            value = getattr(self, f"_{argument.kind}")(argument, data, place)
            choices = argument.choices if isinstance(value, str) else ()
            if choices and value not in choices:
                text = f"{listing([value])} is none of {listing(choices)}"
                return self.find(place, text)
            return value
        finally:
            self._depth -= 1

    def _read_named(self, argument: Argument, name: Any, place: str) -> Any:
        if not isinstance(name, str):
            return self.find(place, 'given is the name of a value: { given = "rate" }')
        if name in self._within:
            circle = " -> ".join([*self._within, name])
            return self.find(f"given.{name}", f"it needs itself: {circle}")
        if name not in self._named:
            self.lacking.setdefault(name, place)
            return NOTHING
        self._within.append(name)
        try:
            return self._read(argument, self._named[name], f"given.{name}")
        finally:
            self._within.pop()

    def _read_all(self, argument: Argument, items: Any, place: str) -> Any:
        """Read the values of a list, or of a table of patterns or names."""
        if isinstance(items, dict):
            values = {
                key: self._read(argument, each, f"{place}.{RULES_FILE.key(key)}")
                for key, each in items.items()
            }
            return NOTHING if _lacks(values.values()) else values
        parts = [
            self._read(argument, each, f"{place}[{number}]")
            for number, each in enumerate(items)
        ]
        return NOTHING if _lacks(parts) else parts

    def _unlike(self, argument: Argument, what: str, data: Any, place: str) -> Any:
        """Note that a value is of another kind."""
        seen = f"the {type(data).__name__} {one_line(repr(data))}"
        return self.find(place, f"expected {what}, not {seen}{_example(argument)}")

    # What is called

    def _transformation(self, argument: Argument, data: Any, place: str) -> Any:
        if isinstance(data, list):
            if not data:
                return self.find(place, f"the list is empty; write {_TABLE}")
            parts = self._read_all(argument, data, place)
            return parts if parts is NOTHING else optax.chain(*map(_nested, parts))
        if isinstance(data, dict):
            return self._call(data, place, TRANSFORMATION)
        if not _is_plain(data) and is_transformation(data):
            return data
        return self._unlike(argument, "an optimizer", data, place)

    def _schedule(self, argument: Argument, data: Any, place: str) -> Any:
        if isinstance(data, dict):
            return self._call(data, place, SCHEDULE)
        if callable(data) and not is_transformation(data):
            return data
        return self._unlike(argument, "a schedule", data, place)

    def _rate(self, argument: Argument, data: Any, place: str) -> Any:
        is_schedule = isinstance(data, dict) or callable(data)
        read = self._schedule if is_schedule else self._number
        return read(argument, data, place)

    def _count(self, argument: Argument, data: Any, place: str) -> Any:
        is_schedule = isinstance(data, dict) or callable(data)
        read = self._schedule if is_schedule else self._whole
        return read(argument, data, place)

    def _call(self, data: Mapping[str, Any], place: str, makes: str) -> Any:
        num_found = self._num_found
        factory = self._factory(data, place, makes)
        if factory is None:
            return NOTHING
        values = self._values(factory, data, place)
        if self._num_found > num_found or _lacks(values.values()):
            return NOTHING
        if factory.name == PARTITION:
            return self._partitioned(place)
        call = factory.call
        if "inject" in data:
            static = factory.arguments.keys() - {*data["inject"]}
            call = inject_hyperparams(call, static_args=sorted(static))
        try:
            result = call(**{name: _nested(value) for name, value in values.items()})
        except Exception as error:  # noqa: BLE001 - of Optax or the caller: a finding
            why = one_line(error) or type(error).__name__
            return self.find(place, f"{factory.name} refuses this: {why}")
        is_right = is_transformation if makes == TRANSFORMATION else callable
        if is_right(result):
            return result
        text = (
            f"{factory.name} returns {one_line(repr(result))}, which is not a {makes}"
        )
        return self.find(place, text)

    def _factory(
        self, data: Mapping[str, Any], place: str, makes: str
    ) -> Factory | None:
        """Return what a table calls; None, and a finding, if that cannot be."""
        name = data.get("type")
        if not isinstance(name, str):
            tables = [
                key for key, each in data.items() if isinstance(each, dict | list)
            ]
            also = [data[key] for key in ("name", "_target_") if key in data]
            cure = f"write {_EXAMPLES[makes]}"
            if also:
                cure = (
                    f'write type = "{self._near_type(str(also[0]), makes) or "adamw"}"'
                )
            elif place == "optimizer" and tables:
                cure = f"did you mean [optimizers.{RULES_FILE.key(tables[0])}]?"
            self.find(place, f"it has no type; {cure}")
        elif name not in self.factories:
            near = self._near_type(name, makes)
            cure = f"did you mean {near!r}?" if near else "types have Optax's names"
            cure = REFUSED.get(name, cure)
            self.find(f"{place}.type", f"there is no type {listing([name])}; {cure}")
        elif self.factories[name].makes not in (makes, ""):
            wrong = f"{name} makes a {self.factories[name].makes}, not a {makes}"
            if makes == TRANSFORMATION:
                wrong += '; write { type = "scale_by_schedule", step_size_fn = ... }'
            self.find(f"{place}.type", wrong)
        else:
            return self.factories[name]
        return None

    def _near_type(self, text: str, makes: str) -> str:
        """Return the type that a text may mean, whatever its case and package."""
        name = text.rpartition(".")[2].lower()
        known = {
            each.lower(): each
            for each, factory in self.factories.items()
            if factory.makes in (makes, "")
        }
        return known.get(_near(name, known), "")

    def _values(
        self, factory: Factory, data: Mapping[str, Any], place: str
    ) -> dict[str, Any]:
        """Read the arguments of a call; notes those that it lacks, or has too many."""
        arguments = {**factory.arguments, **self._injected(factory, data, place)}
        values: dict[str, Any] = {}
        meant: set[str] = set()
        for name, each in data.items():
            if name in arguments:
                at = f"{place}.{name}"
                values[name] = self._read(arguments[name], each, at)
                if name in _RATES:
                    self.rates.append(Rate(at, self._label, each, values[name]))
            elif name not in ("type", "inject"):
                near = [known for known in _ALSO.get(name, ()) if known in arguments]
                near = near or [*filter(None, [_near(name, arguments)])]
                meant.update(near)
                hint = f"; it has {listing(arguments)}" if arguments else ""
                if near:
                    hint = f"; did you mean {' and '.join(map(repr, near))}?"
                text = f"{factory.name} has no argument {listing([name])}{hint}"
                self.find(f"{place}.{name}", text)
        if "stacks" in arguments and self._file_stacks:
            values.setdefault("stacks", self._file_stacks)
        lacking = [n for n, x in arguments.items() if x.is_required and n not in values]
        if lacking and meant.issuperset(lacking):
            return values  # that was said
        if lacking:
            self.find(place, f"{factory.name} needs {listing(lacking)}")
        elif factory.name == "join_schedules" and not _lacks(values.values()):
            parts, steps = values["schedules"], values["boundaries"]
            if len(steps) != len(parts) - 1:
                text = f"{len(parts)} schedules have {len(parts) - 1} boundaries"
                self.find(f"{place}.boundaries", f"{text}, not {len(steps)}")
            elif steps != sorted(set(steps)):
                self.find(f"{place}.boundaries", "they are not in order")
        return values

    def _injected(
        self, factory: Factory, data: Mapping[str, Any], place: str
    ) -> dict[str, Argument]:
        """Return the arguments that ``inject`` names; each takes a schedule, too."""
        names = data.get("inject", [])
        able = {n: x for n, x in factory.arguments.items() if x.kind in _INJECTED}
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            self.find(f"{place}.inject", 'write a list: inject = ["learning_rate"]')
            return {}
        for name in names:
            if name not in able:
                which = f"; choose from {listing(able, limit=20)}" if able else ""
                text = f"{listing([name])} is not a number of {factory.name}{which}"
                self.find(f"{place}.inject", text)
            elif name not in data and not is_number(able[name].default):
                self.find(f"{place}.inject", f"{name} has no value here")
        return {
            name: dataclasses.replace(able[name], kind="rate")
            for name in names
            if name in able
        }

    def _partitioned(self, place: str) -> Any:
        self.num_partitions += 1
        if self._label or self.num_partitions > 1:
            return self.find(place, "partition goes into [optimizer], and once")
        if self.partition is None:
            return self.find(
                place, "partition needs [rules], and [optimizers] for them"
            )
        return self.partition()

    # What is data

    def _number(self, argument: Argument, data: Any, place: str) -> Any:
        is_table = isinstance(data, dict) and "type" in data
        if is_table or (callable(data) and not is_array(data)):
            text = "a schedule cannot be here, where Optax takes a number"
            name = place.rpartition(".")[2]
            cure = f'; write inject = ["{name}"] next to type'
            can = argument.kind in _INJECTED
            return self.find(place, text + (cure if can else ""))
        if isinstance(data, str):
            with contextlib.suppress(ValueError):
                text = f"{data!r} is a text, not the number {float(data)!r}"
                yaml = "; YAML takes 1e-3 for a text, and 1.0e-3 for a number"
                return self.find(place, text + (yaml if "e" in data.lower() else ""))
        if isinstance(data, bool) or not (is_number(data) or _is_scalar(data)):
            return self._unlike(argument, "a number", data, place)
        if not _is_plain(data):
            return data  # of the caller, perhaps traced
        if not -_MAX_NUMBER <= data <= _MAX_NUMBER:
            text = f"{one_line(data)} is not a finite number of at most {_MAX_NUMBER}"
            return self.find(place, text)
        if argument.least is not None and data < argument.least:
            return self.find(place, f"{data!r} is less than {argument.least}")
        return data

    def _whole(self, argument: Argument, data: Any, place: str) -> Any:
        number = self._number(argument, data, place)
        if number is NOTHING or not _is_plain(number):
            return number
        if number != int(number):
            return self.find(place, f"{number!r} is not a whole number")
        if abs(number) > argument.most:
            return self.find(place, f"{number!r} is more than {argument.most:,}")
        return int(number)

    def _bool(self, argument: Argument, data: Any, place: str) -> Any:
        if isinstance(data, bool):
            return data
        return self._unlike(argument, "a bool", data, place)

    def _text(self, argument: Argument, data: Any, place: str) -> Any:
        if isinstance(data, str):
            return data
        return self._unlike(argument, "a text", data, place)

    def _dtype(self, argument: Argument, data: Any, place: str) -> Any:
        if isinstance(data, str) or not _is_plain(data):
            with contextlib.suppress(TypeError, ValueError):
                if jnp.issubdtype(jnp.dtype(data), jnp.inexact):
                    return jnp.dtype(data)
        return self._unlike(argument, "a floating-point dtype", data, place)

    def _object(self, argument: Argument, data: Any, place: str) -> Any:
        if not _is_plain(data):
            return data
        name = place.rpartition(".")[2]
        cure = f'write {name} = {{ given = "{name}" }}, and pass {name}='
        return self.find(place, f"a file cannot hold it; {cure}")

    def _any(self, argument: Argument, data: Any, place: str) -> Any:
        if isinstance(data, dict) and "type" in data:
            factory = self.factories.get(str(data["type"]))
            return self._call(data, place, factory.makes if factory else SCHEDULE)
        if isinstance(data, list | dict):
            return self._read_all(argument, data, place)
        is_text = isinstance(data, str | bool) or not _is_plain(data)
        return data if is_text else self._number(argument, data, place)

    def _several(
        self, item: Argument, data: Any, place: str, what: str, limit: int
    ) -> Any:
        """Read a list, or a table, of values of one kind."""
        kind = dict if what.startswith("a table") else list
        if not isinstance(data, kind) or not data:
            return self._unlike(item, what, data, place)
        if len(data) > limit:
            return self.find(place, f"it has {len(data):,} entries; at most {limit:,}")
        return self._read_all(item, data, place)

    def _schedules(self, argument: Argument, data: Any, place: str) -> Any:
        what = "a list of schedules"
        return self._several(Argument(SCHEDULE), data, place, what, MAX_BOUNDARIES)

    def _boundaries(self, argument: Argument, data: Any, place: str) -> Any:
        step = Argument("whole", least=1)
        return self._several(step, data, place, "a list of steps", MAX_BOUNDARIES)

    def _scales(self, argument: Argument, data: Any, place: str) -> Any:
        what = 'a table, such as { "1000" = 0.1 }'
        number = Argument("number")
        scales = self._several(number, data, place, what, MAX_BOUNDARIES)
        if scales is NOTHING:
            return scales
        for step in scales:
            if not re.fullmatch("[0-9]{1,10}", step) or int(step) > LARGEST:
                return self.find(place, f"{listing([step])} is not a step")
        return {int(step): scale for step, scale in scales.items()}

    def _cycles(self, argument: Argument, data: Any, place: str) -> Any:
        what = "a list of tables"
        return self._several(Argument("cycle"), data, place, what, MAX_BOUNDARIES)

    def _cycle(self, argument: Argument, data: Any, place: str) -> Any:
        if not isinstance(data, dict):
            return self._unlike(argument, "a table", data, place)
        cosine = self.factories["warmup_cosine_decay_schedule"]
        values = self._values(cosine, data, place)
        return NOTHING if _lacks(values.values()) else values

    def _tuple(self, argument: Argument, data: Any, place: str) -> Any:
        if not isinstance(data, list) or len(data) != (argument.length or len(data)):
            what = f"a list of {argument.length}" if argument.length else "a list"
            return self._unlike(argument, what, data, place)
        parts = []
        for number, each in enumerate(data):
            kind = "tuple" if isinstance(each, list) else "number"
            kind = "text" if isinstance(each, str) else kind
            item = dataclasses.replace(argument, kind=kind, length=None)
            parts.append(self._read(item, each, f"{place}[{number}]"))
        return NOTHING if _lacks(parts) else tuple(parts)

    def _axis(self, argument: Argument, data: Any, place: str) -> Any:
        if not isinstance(data, list):
            return self._whole(_AXIS, data, place)
        axes = self._several(_AXIS, data, place, "a list of axes", _AXIS.most)
        return axes if axes is NOTHING else tuple(axes)

    # What selects leaves

    def _mask(self, argument: Argument, data: Any, place: str) -> Any:
        if isinstance(data, bool) or not _is_plain(data):
            return data
        patterns = [data] if isinstance(data, str) else data
        if not isinstance(patterns, list) or not patterns:
            return self._unlike(argument, "a pattern", data, place)
        return self._selecting(place, patterns, lambda: as_selector(patterns))

    def _axes(self, argument: Argument, data: Any, place: str) -> Any:
        numbers = Argument("dimensions", allows_none=True, fields=argument.fields)
        return self._table(argument, numbers, data, place)

    def _dimensions(self, argument: Argument, data: Any, place: str) -> Any:
        names = argument.fields._fields
        if not isinstance(data, dict) or not data.keys() <= {*names}:
            what = f"a table of {listing(names)}, or none"
            return self._unlike(argument, what, data, place)
        axes = self._read_all(Argument("axis"), data, place)
        return axes if axes is NOTHING else argument.fields(**axes)

    def _factors(self, argument: Argument, data: Any, place: str) -> Any:
        return self._table(argument, Argument("number"), data, place)

    def _table(self, argument: Argument, item: Argument, data: Any, place: str) -> Any:
        """Read a table of patterns as rules."""
        if not _is_plain(data):
            return data
        if not isinstance(data, dict) or not data:
            return self._unlike(argument, "a table of patterns", data, place)
        values = self._read_all(item, data, place)
        if values is NOTHING:
            return values
        make = functools.partial(Rules, values, stacks=self._file_stacks)
        return self._selecting(place, [*values], make)

    def _stacks(self, argument: Argument, data: Any, place: str) -> Any:
        return self._selecting(place, [], lambda: read_stacks("", data))

    def _selecting(
        self, place: str, patterns: Sequence[Any], make: Callable[[], Any]
    ) -> Any:
        """Return what selects leaves by patterns, once these are checked."""
        try:
            check_patterns("", patterns, allow_regex=self._allow_regex)
            where = make()
        except TreeAdaptError as error:
            return self.find(place, str(error).removeprefix("Rules file '': "))
        if patterns:
            each = Selection(place, self._label, where, tuple(patterns))
            self.selections.append(each)
        return where


def _nested(value: Any) -> Any:
    """Return an argument as Optax takes it: its own ``chain`` takes no MultiSteps."""
    return with_extra_args(value) if isinstance(value, optax.MultiSteps) else value


def _near(text: str, names: Iterable[str]) -> str:
    """Return the shortest name that begins with a text, or the most similar one."""
    longer = [name for name in names if text and name.startswith(text)]
    return min(longer, key=len, default="") or Speller().best(text, names)


def _example(argument: Argument) -> str:
    example = _EXAMPLES.get(argument.kind)
    return f"; write {example}" if example else ""


def _lacks(values: Iterable[Any]) -> bool:
    return any(value is NOTHING for value in values)


def _is_plain(data: Any) -> bool:
    return type(data) in (type(None), bool, int, float, str, list, dict)


def _is_scalar(data: Any) -> bool:
    return is_array(data) and data.shape == () and data.dtype != jnp.bool_
