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
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from treeadapt.errors import TreeAdaptError
from treeadapt.optimizers.factories import (
    LACKING,
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
from treeadapt.text.data_files import one_line
from treeadapt.text.names import Speller, listing
from treeadapt.text.places import Place, place_text
from treeadapt.transforms.adapt import is_transformation, with_extra_args
from treeadapt.transforms.hyperparams import inject_hyperparams
from treeadapt.trees.arrays import is_array, is_number

MAX_DEPTH = 32
MAX_VALUES = 10_000  # that are read; a named one each time that it is used
MAX_BOUNDARIES = 1_000
_MAX_NAME = 40  # letters of a name that is proposed
_MAX_NUMBER = 1e38  # float32 holds 3.4e38

#: What stands for a value that is wrong, or that nobody gives.
NOTHING = type("Nothing", (), {"__repr__": lambda self: "NOTHING"})()

# What other programs call arguments.
ALSO = {"lr": "learning_rate", "wd": "weight_decay", "betas": "b1, b2", "beta1": "b1"}
ALSO |= {"beta2": "b2", "epsilon": "eps", "schedule": "learning_rate"}
EACH = "each"  # the table of arguments for the optimizers of all labels
# What a file has for each kind of argument: its types, words, and an example.
_AXES = '{ "**/kernel" = { reduction_axis = 0, output_axis = 1 }, "**" = "none" }'
_FORMS: dict[str, tuple[tuple[type, ...], str, str]] = {
    TRANSFORMATION: (
        (dict, list),
        "an optimizer",
        '{ type = "adamw", learning_rate = 1e-3 }',
    ),
    SCHEDULE: ((dict,), "a schedule", '{ type = "constant_schedule", value = 1e-3 }'),
    "schedules": ((list,), "a list of schedules", "[{ type = ... }, { type = ... }]"),
    "boundaries": ((list,), "a list of steps", "[1000, 2000]"),
    "scales": ((dict,), "a table of steps", '{ "1000" = 0.1 }'),
    "cycles": ((list,), "a list of tables", "[{ peak_value = 1e-3, ... }]"),
    "cycle": ((dict,), "a table", "{ peak_value = 1e-3, ... }"),
    "object": ((), "what only Python has", ""),
    "bool": ((bool,), "a bool", "true or false"),
    "text": ((str,), "a text", "it in quotes"),
    "dtype": ((str,), "a floating-point dtype", '"bfloat16" or "float32"'),
    "tuple": ((list,), "a list", "[0.9, 0.999]"),
    "mask": ((str, list, bool), "a pattern", '"**/kernel", or ["**", "!**/bias"]'),
    "axes": ((dict,), "a table of patterns", _AXES),
    "dimensions": ((dict,), "a table of axes, or none", "{ output_axis = [1, 2] }"),
    "factors": ((dict,), "a table of patterns", '{ "blocks/0" = 0.1, "**" = 1.0 }'),
    "stacks": ((dict,), "a table of stacks", '{ "blocks" = 0 }'),
}
_NUMBER, _AXIS = Argument("number"), Argument("whole", least=None, most=64)
_ITEMS = {
    "schedules": Argument(SCHEDULE),
    "boundaries": Argument("whole", least=1),
    "scales": _NUMBER,
    "cycles": Argument("cycle"),
}
# How YAML files of OmegaConf name a value: "${lr}", "${given.lr}".
_INTERPOLATED = re.compile(r"\$\{([\w.]+)\}")
_RATES = ("learning_rate", "step_size", "step_size_fn")
_INJECTED = ("number", "rate")  # kinds that a state can hold
_MAY_BE_EMPTY = ("any", "dimensions", "tuple", "item")


class Fault(NamedTuple):
    """What is wrong with a file, and where; the place is empty for the whole."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{place_text(self.place)}: {self.text}" if self.place else self.text


@dataclasses.dataclass(frozen=True)
class Selection:
    """What selects leaves inside an optimizer: a mask, or a table of patterns.

    Attributes:
        place: where the file says it.
        label: of the leaves that are trained there; "" for all that are not frozen.
        where: the selector, or rules whose values are axes or factors.
        patterns: as typed.
    """

    place: Place
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

    place: Place
    label: str
    data: Any
    value: Any


class TooMuchError(Exception):
    """A file asks for more than is read; ``fault`` says of what, and where."""

    def __init__(self, place: Place, text: str):
        super().__init__(text)
        self.fault = Fault(place, text)


class _NothingError(Exception):
    """A value is wrong, which has been noted, or nobody gives it."""


class Builder:
    """Builds transformations, and notes what is wrong.

    Args:
        values_by_name: texts, numbers, lists and tables are data.
        options: of the file's rules, for its tables of patterns.
        each: arguments for the optimizers of all labels; see ``shared``.
        allow_regex: accept ``re:`` patterns.

    Attributes:
        factories: what a table may name, those of the caller too.
        findings: what is wrong, each with its place.
        lacking: names that nobody gives, and where the first use of each is.
        selections: masks and tables of patterns.
        rates: those of the file.
        partition: makes what ``partition`` means in the file; None without labels.
        num_partitions: how often the file says that.
    """

    def __init__(
        self,
        values_by_name: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        each: Mapping[str, Any],
        allow_regex: bool,
    ):
        self.factories = dict(factories())
        self._values_by_name, self._options = values_by_name, options
        self._each = each
        self._allow_regex, self._label = allow_regex, ""
        self._within: list[str] = []  # names whose values are being read
        self._depth = self._num_read = self._num_found = self.num_partitions = 0
        self.findings: dict[Fault, None] = {}
        self.lacking: dict[str, Place] = {}
        self.selections: list[Selection] = []
        self.rates: list[Rate] = []
        self.partition: Callable[[], Any] | None = None

    def build(self, data: Any, place: Place, label: str = "") -> Any:
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

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong, and nobody has to give more."""
        return not (self.findings or self.lacking)

    def find(self, place: Place, text: str) -> None:
        """Note what is wrong at a place, or with the whole file if that is empty."""
        self._num_found += 1
        self.findings[Fault(place, text)] = None

    def _refuse(self, place: Place, text: str) -> NoReturn:
        """Note what is wrong at a place, and read no further there."""
        self.find(place, text)
        raise _NothingError

    def _read(self, argument: Argument, data: Any, place: Place) -> Any:
        """Read a value as its argument asks; ``NOTHING`` if that cannot be done.

        Methods with the names of kinds read data of these; they raise in that case.
        """
        self._num_read += 1
        self._depth += 1
        if self._num_read > MAX_VALUES:
            raise TooMuchError((), f"it has more than {MAX_VALUES:,} values")
        if self._depth > MAX_DEPTH:
            raise TooMuchError(place, f"it is nested deeper than {MAX_DEPTH}")
        try:
            if isinstance(data, dict) and data.keys() == {"given"}:
                return self._read_named(argument, data["given"], place)
            return self._read_given(argument, data, place)
        except _NothingError:
            return NOTHING
        finally:
            self._depth -= 1

    def _read_given(self, argument: Argument, data: Any, place: Place) -> Any:
        kind, choices = argument.kind, argument.choices
        is_plain = type(data) in (bool, int, float, str, list, dict)
        if data is None or (is_plain and data == "none"):
            data, is_plain, fits = None, False, argument.allows_none
        elif is_plain:
            fits = kind not in _FORMS or type(data) in _FORMS[kind][0]
            fits = fits and (data not in ([], {}) or kind in _MAY_BE_EMPTY)
        else:
            fits = _fits(kind, data)
        if not fits:
            self._unlike(argument, data, place)
        read = getattr(self, f"_{kind}", None) if is_plain else None
        value = data if read is None else read(argument, data, place)
        if isinstance(value, str) and choices and value not in choices:
            self._refuse(place, f"{value!r} is none of {listing(choices)}")
        return value

    def _read_named(self, argument: Argument, name: Any, place: Place) -> Any:
        if not isinstance(name, str):
            self._refuse(place, 'given is the name of a value: { given = "rate" }')
        if name in self._within:
            circle = " -> ".join([*self._within, name])
            self._refuse(("given", name), f"it needs itself: {circle}")
        if name not in self._values_by_name:
            if not name.isidentifier() or keyword.iskeyword(name):
                new = _as_name(name)
                text = f"{listing([name])} is not a name, and nothing is computed here"
                cure = f'write {{ given = "{new}" }}, and pass {new}='
                self._refuse(place, f"{text}; {cure}")
            self.lacking.setdefault(name, place)
            return NOTHING
        self._within.append(name)
        value = self._read(argument, self._values_by_name[name], ("given", name))
        self._within.pop()
        return value

    def _read_all(self, argument: Argument, items: Any, place: Place) -> Any:
        """Read the values of a list, or of a table of patterns or names."""
        is_table = isinstance(items, dict)
        values = {
            key: self._read(argument, items[key], (*place, key))
            for key in (items if is_table else range(len(items)))
        }
        _require_all(values)
        return values if is_table else [*values.values()]

    def _unlike(self, argument: Argument, data: Any, place: Place) -> NoReturn:
        """Refuse a value that is of another kind."""
        name, kind = _last(place), argument.kind
        _, what, example = _FORMS.get(kind, ((), "a number", ""))
        if kind == "object":
            example = f'{name} = {{ given = "{name}" }}, and pass {name}='
        what += f" of length {argument.length}" if argument.length else ""
        seen = f"the {type(data).__name__} {one_line(repr(data))}"
        seen = "none" if data is None else seen
        cure = f"write {example}"
        if kind not in _FORMS:  # a number made up here might be trained with
            cure = f"write {name} = 1e-3" if name in _RATES else "write a number"
            if is_number(argument.default):
                cure = f"leave it out for the default, {argument.default!r}"
        if isinstance(data, str):
            interpolated = _INTERPOLATED.fullmatch(data)
            meant = (interpolated[1] if interpolated else data).rpartition(".")[2]
            if interpolated or meant in self._values_by_name:
                cure = f'write {{ given = "{meant}" }}'
                cure += f", and pass {meant}=" * (meant not in self._values_by_name)
        self._refuse(place, f"expected {what}, not {seen}; {cure}")

    # What is called

    def _transformation(self, argument: Argument, data: Any, place: Place) -> Any:
        if isinstance(data, dict):
            return self._call(data, place, TRANSFORMATION)
        return optax.chain(*map(_nested, self._read_all(argument, data, place)))

    def _schedule(self, _: Argument, data: Any, place: Place) -> Any:
        return self._call(data, place, SCHEDULE)

    def _rate(self, argument: Argument, data: Any, place: Place) -> Any:
        if isinstance(data, dict):
            return self._call(data, place, SCHEDULE)
        is_whole = argument.kind == "count"
        return (self._whole if is_whole else self._number)(argument, data, place)

    _count = _rate

    def _call(self, data: Mapping[str, Any], place: Place, makes: str) -> Any:
        factory = self._factory(data, place, makes)
        values = self._values(factory, data, place)
        if factory.name == PARTITION:
            self.num_partitions += 1
            if self._label or self.num_partitions > 1:
                self._refuse(place, "partition goes into [optimizer], and once")
            if self.partition is None:
                self._refuse(place, "partition needs [rules], and [optimizers] for it")
            if not self.is_whole:
                raise _NothingError
            return self.partition()
        call = factory.call
        if "inject" in data:
            static = factory.arguments.keys() - {*data["inject"]}
            call = inject_hyperparams(call, static_args=sorted(static))
        try:
            result = call(**{name: _nested(value) for name, value in values.items()})
        except Exception as error:  # noqa: BLE001 - of Optax or the caller: a finding
            why = one_line(error) or type(error).__name__
            self._refuse(place, f"{factory.name} refuses this: {why}")
        if not _fits(makes, result):
            what = f"{one_line(repr(result))}, which is not a {makes}"
            self._refuse(place, f"{factory.name} returns {what}")
        return result

    def _factory(self, data: Mapping[str, Any], place: Place, makes: str) -> Factory:
        """Return what a table calls."""
        name = data.get("type", data.get("name", data.get("_target_")))
        near = self._near_type(name, makes) if isinstance(name, str) else ""
        other = _other_cure(name) if isinstance(name, str) else ""
        if "type" not in data or not isinstance(name, str):
            tables = [n for n, x in data.items() if isinstance(x, dict) and n != "type"]
            cure = f'write type = "{near}"' if near else f"write {_FORMS[makes][2]}"
            cure = other or cure
            if place == ("optimizer",) and tables and not near:
                cure = f"did you mean [optimizers.{RULES_FILE.key(tables[0])}]?"
            self._refuse(place, f"it has no type; {cure}")
        if name not in self.factories:
            cure = f"did you mean {near!r}?" if near else "types have Optax's names"
            text = f"there is no type {listing([name])}; {other or cure}"
            self._refuse((*place, "type"), text)
        factory = self.factories[name]
        if factory.makes not in (makes, ""):
            wrong = f"{name} makes a {factory.makes}, not a {makes}"
            if makes == TRANSFORMATION:
                wrong += '; write { type = "scale_by_schedule", step_size_fn = ... }'
            self._refuse((*place, "type"), wrong)
        return factory

    def _near_type(self, text: str, makes: str) -> str:
        """Return the type that a text may mean, whatever its case and package."""
        every = self.factories.values()
        fitting = (each.name for each in every if each.makes in (makes, ""))
        by_lower = {name.lower(): name for name in fitting}
        return by_lower.get(_near(text.rpartition(".")[2].lower(), by_lower), "")

    def _values(
        self, factory: Factory, data: Mapping[str, Any], place: Place
    ) -> dict[str, Any]:
        """Read the arguments of a call; notes those that it lacks, or has too many."""
        num_found = self._num_found
        # A list is a chain, which takes them; what is inside a table does not.
        is_of_label = place[:1] == ("optimizers",) and not any(
            isinstance(key, str) for key in place[2:]
        )
        shared = factory.shared(self._each, data) if is_of_label else {}
        data = {**data, **shared}
        arguments = {**factory.arguments, **self._injected(factory, data, place)}
        values: dict[str, Any] = {}
        meant: set[str] = set()
        for name, each in data.items():
            at = (EACH, name) if name in shared else (*place, name)
            if name in arguments:
                values[name] = self._read(arguments[name], each, at)
                if name in _RATES:
                    self.rates.append(Rate(at, self._label, each, values[name]))
            elif name not in ("type", "inject"):
                also = [x for x in ALSO.get(name, "").split(", ") if x in arguments]
                near = also or [*filter(None, [_near(name, arguments)])]
                meant.update(near)
                hint = f"; it has {listing(arguments)}" if arguments else ""
                hint = f"; did you mean {listing(near)}?" if near else hint
                text = f"{factory.name} has no argument {listing([name])}{hint}"
                self.find(at, text)
        if "stacks" in arguments and self._options.get("stacks"):
            values.setdefault("stacks", self._options["stacks"])
        lacking = [n for n, x in arguments.items() if x.is_required and n not in values]
        if lacking and not meant.issuperset(lacking):
            self.find(place, f"{factory.name} needs {listing(lacking)}")
        if self._num_found > num_found:
            raise _NothingError
        _require_all(values)
        if factory.name == "join_schedules":
            self._check_boundaries((*place, "boundaries"), **values)
        return values

    def _check_boundaries(
        self, place: Place, schedules: Sequence[Any], boundaries: Sequence[int]
    ) -> None:
        count = len(schedules) - 1
        if len(boundaries) != count:
            text = f"{count + 1} schedules have {count} boundaries"
            self._refuse(place, f"{text}, not {len(boundaries)}")
        if [*boundaries] != sorted(set(boundaries)):
            self._refuse(place, "they are not in order")

    def _injected(
        self, factory: Factory, data: Mapping[str, Any], place: Place
    ) -> dict[str, Argument]:
        """Return the arguments that ``inject`` names; each takes a schedule, too."""
        names = data.get("inject", [])
        able = {n: x for n, x in factory.arguments.items() if x.kind in _INJECTED}
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            self.find((*place, "inject"), 'write a list: inject = ["learning_rate"]')
            return {}
        for name in names:
            if name not in able:
                text = f"{listing([name])} is not a number of {factory.name}"
                self.find((*place, "inject"), f"{text}; it has {listing(able)}")
            elif name not in data and not is_number(able[name].default):
                self.find((*place, "inject"), f"{name} has no value here")
        able = {name: x for name, x in able.items() if name in names}
        return {name: dataclasses.replace(x, kind="rate") for name, x in able.items()}

    # What is data

    def _number(self, argument: Argument, data: Any, place: Place) -> Any:
        if isinstance(data, dict) and "type" in data:
            text = "a schedule cannot be here, where Optax takes a number"
            name = _last(place)
            cure = f'; write inject = ["{name}"] next to type'
            self._refuse(place, text + cure * (argument.kind in _INJECTED))
        if isinstance(data, str):
            with contextlib.suppress(ValueError):
                text = f"{data!r} is a text, not the number {float(data)!r}"
                yaml = "; YAML takes 1e-3 for a text, and 1.0e-3 for a number"
                self._refuse(place, text + yaml * ("e" in data.lower()))
        if type(data) not in (int, float):
            self._unlike(argument, data, place)
        if not -_MAX_NUMBER <= data <= _MAX_NUMBER:
            text = f"{one_line(data)} is not a finite number of at most {_MAX_NUMBER}"
            self._refuse(place, text)
        if isinstance(data, int) and abs(data) > LARGEST:
            text = f"{data!r} is more than {LARGEST:,}"  # of an int32 on a device
            self._refuse(place, f"{text}; write {float(data)!r}")
        if argument.least is not None and data < argument.least:
            self._refuse(place, f"{data!r} is less than {argument.least}")
        if argument.is_below_1 and data >= 1 and data != argument.default:
            text = f"{data!r} is not less than 1, as a decay rate is"
            if is_number(argument.default):
                text += f"; the default is {argument.default!r}"
            self._refuse(place, text)
        return data

    def _whole(self, argument: Argument, data: Any, place: Place) -> Any:
        number = self._number(argument, data, place)
        if number != int(number):
            self._refuse(place, f"{number!r} is not a whole number")
        if abs(number) > argument.most:
            self._refuse(place, f"{number!r} is more than {argument.most:,}")
        return int(number)

    def _dtype(self, argument: Argument, data: Any, place: Place) -> Any:
        # NumPy reads more into a text: "1e-3" and "(2,)f4" are formats to it.
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(data) if re.fullmatch("[a-z][a-z0-9_]*", data) else None
            if dtype is not None and _is_inexact(dtype):
                return dtype
        self._unlike(argument, data, place)

    def _any(self, argument: Argument, data: Any, place: Place) -> Any:
        if isinstance(data, dict) and "type" in data:
            factory = self.factories.get(str(data["type"]))
            return self._call(data, place, factory.makes if factory else SCHEDULE)
        if isinstance(data, list | dict):
            return self._read_all(argument, data, place)
        is_text = isinstance(data, str | bool)
        return data if is_text else self._number(argument, data, place)

    def _schedules(self, argument: Argument, data: Any, place: Place) -> Any:
        if len(data) > MAX_BOUNDARIES:
            text = f"it has {len(data):,} entries; at most {MAX_BOUNDARIES:,}"
            self._refuse(place, text)
        return self._read_all(_ITEMS[argument.kind], data, place)

    _boundaries = _cycles = _schedules

    def _scales(self, argument: Argument, data: Any, place: Place) -> Any:
        for step in data:
            if not re.fullmatch("[0-9]{1,10}", step) or int(step) > LARGEST:
                self._refuse(place, f"{listing([step])} is not a step")
        scales = self._schedules(argument, data, place)
        return {int(step): scale for step, scale in scales.items()}

    def _cycle(self, _: Argument, data: Any, place: Place) -> Any:
        cosine = self.factories["warmup_cosine_decay_schedule"]
        return self._values(cosine, data, place)

    def _tuple(self, argument: Argument, data: Any, place: Place) -> Any:
        if len(data) != (argument.length or len(data)):
            self._unlike(argument, data, place)
        item = dataclasses.replace(argument, kind="item", length=None)
        return tuple(self._read_all(item, data, place))

    def _item(self, argument: Argument, data: Any, place: Place) -> Any:
        if isinstance(data, list):
            return self._tuple(argument, data, place)
        is_text = isinstance(data, str)
        return data if is_text else self._number(argument, data, place)

    def _axis(self, _: Argument, data: Any, place: Place) -> Any:
        if isinstance(data, list):
            return tuple(self._read_all(_AXIS, data, place))
        return self._whole(_AXIS, data, place)

    def _dimensions(self, argument: Argument, data: Any, place: Place) -> Any:
        if not data.keys() <= {*argument.fields._fields}:
            self._unlike(argument, data, place)
        return argument.fields(**self._read_all(Argument("axis"), data, place))

    def _stacks(self, _: Argument, data: Any, place: Place) -> Any:
        return read_stacks(data)

    # What selects leaves

    def _mask(self, _: Argument, data: Any, place: Place) -> Any:
        if isinstance(data, bool):
            return data
        patterns = [data] if isinstance(data, str) else data
        return self._selecting(place, patterns, lambda: as_selector(patterns))

    def _factors(self, argument: Argument, data: Any, place: Place) -> Any:
        item, fields = _NUMBER, argument.fields
        if argument.kind == "axes":
            item = Argument("dimensions", allows_none=True, fields=fields)
        values = self._read_all(item, data, place)
        make = functools.partial(Rules, values, **self._options)
        return self._selecting(place, [*values], make)

    _axes = _factors

    def _selecting(
        self, place: Place, patterns: Sequence[Any], make: Callable[[], Any]
    ) -> Any:
        """Return what selects leaves by patterns, once these are checked."""
        try:
            check_patterns("", patterns, allow_regex=self._allow_regex)
            where = make()
        except TreeAdaptError as error:
            self._refuse(place, str(error))
        each = Selection(place, self._label, where, tuple(patterns))
        self.selections.append(each)
        return where


def _nested(value: Any) -> Any:
    """Return an argument as Optax takes it: its own ``chain`` takes no MultiSteps."""
    return with_extra_args(value) if isinstance(value, optax.MultiSteps) else value


def _fits(kind: str, value: Any) -> bool:
    """Return whether a value that is not data is of a kind, as far as that is asked."""
    is_scalar = is_array(value) and value.shape == ()
    is_number = is_scalar and value.dtype != jnp.bool_
    if kind in ("any", "object"):
        return True
    if kind == TRANSFORMATION:
        return is_transformation(value)
    if kind in (SCHEDULE, "rate", "count"):
        is_schedule = callable(value) and not is_transformation(value)
        return is_schedule or (is_number and kind != SCHEDULE)
    if kind == "dtype":
        return _is_inexact(value)
    if kind == "bool":
        return is_scalar and not is_number
    if kind in ("mask", "axes", "factors"):  # functions, selectors, rules, trees
        is_tree = not jtu.all_leaves([value])
        return callable(value) or is_tree or (kind == "mask" and is_scalar)
    if kind in ("tuple", "dimensions", "axis", "boundaries", "schedules"):
        return isinstance(value, tuple) or is_array(value)
    return is_number and kind in ("number", "whole", "item")


def _is_inexact(dtype: Any) -> bool:
    with contextlib.suppress(TypeError):
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.inexact))
    return False


def _other_cure(name: str) -> str:
    """Return what to write for a type that is refused, or that Optax lacks, if any."""
    last = name.rpartition(".")[2].lower()
    return REFUSED.get(last) or LACKING.get(last, "")


def _as_name(text: str) -> str:
    """Return a name for what a text computes.

    Example:
        >>> _as_name("lr * 0.1"), _as_name("0.1"), _as_name("lambda")
        ('lr_0_1', 'value_0_1', 'lambda_')
    """
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")[:_MAX_NAME] or "value"
    name = f"value_{name}" if name[0].isdigit() else name
    return name + "_" * keyword.iskeyword(name)


def _near(text: str, names: Iterable[str]) -> str:
    """Return the shortest name that begins with a text, or the most similar one."""
    longer = [name for name in names if text and name.startswith(text)]
    return min(longer, key=len, default="") or Speller().best(text, names)


def _last(place: Place) -> str:
    """Return the last name in a place, with the numbers after it."""
    names = [at for at, key in enumerate(place) if isinstance(key, str)]
    return place_text(place[names[-1] :])


def _require_all(values: Mapping[Any, Any]) -> None:
    """Raise if some value is wrong, or nobody gives it."""
    if any(value is NOTHING for value in values.values()):
        raise _NothingError
