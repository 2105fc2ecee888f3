"""Factories: what a table may name as its ``type``, and how each argument is read.

The names are those of Optax's own functions whose annotation promises a transformation
or a schedule, with a few added and a few refused. A file's text is only ever a key of
this dictionary: nothing is imported, and no attribute is looked up, by a name from a
file. Annotations and defaults say what an argument is; where they are silent, its name.
See ``building`` for how each kind of argument is read.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import optax

from treeadapt.transforms.hyperparams import signature_of, type_names
from treeadapt.transforms.per_layer import per_layer
from treeadapt.transforms.scale import scale_by_rules

TRANSFORMATION, SCHEDULE, PARTITION = "transformation", "schedule", "partition"
LARGEST = 2**31 - 1  # of whole numbers; as an int32 on a device

# These have no annotation of what they return, or are classes.
_ADDED: dict[str, Any] = {
    "MultiSteps": optax.MultiSteps,
    "dog": optax.contrib.dog,
    "dowg": optax.contrib.dowg,
    "per_layer": per_layer,
    "scale_by_factored_rms": optax.scale_by_factored_rms,
    "scale_by_rules": scale_by_rules,
}
_FUNCTION = "it takes a function: build it in Python and pass it with names="
REFUSED = {
    "chain": "write its parts as tables in a list",
    "named_chain": "write its parts as tables in a list",
    "multi_transform": 'write [optimizers] for the labels, and type = "partition"',
    "freeze": 'give the leaves the label "frozen" in [rules]',
    "selective_transform": 'give the leaves the label "frozen" in [rules]',
    "conditionally_mask": _FUNCTION,
    "conditionally_transform": _FUNCTION,
    "stateless": _FUNCTION,
    "stateless_with_tree_map": _FUNCTION,
    "measure_with_ema": _FUNCTION,
    "snapshot": _FUNCTION,
    "with_extra_args_support": "leave it out: every transformation has it here",
    "inject_hyperparams": 'write inject = ["learning_rate"] next to type',
    "inject_stateful_hyperparams": 'write inject = ["learning_rate"] next to type',
    "adapt": "leave it out: the result runs on any tree",
    # Optax makes these with functools.partial.
    "nadam": 'write type = "adam" with nesterov = true',
    "nadamw": 'write type = "adamw" with nesterov = true',
}
# Optimizers that Optax lacks and whose names read like those of others.
_LACKING = (
    "adabound adahessian adamp apollo_adamw asgd dadaptsgd galore_adamw nlamb nlion "
    "psgd qhadam qhm ranger schedule_free_radam sgdp sgdw shampoo soap sparseadam"
)
LACKING = dict.fromkeys(
    _LACKING.split(), "Optax has no such optimizer: pass a function with names="
)

# What an argument is whose annotation does not say it.
_BY_NAME = (
    (r".*mask", "mask"),
    (r".*dimension_numbers", "axes"),
    (r".*dtype.*", "dtype"),
    ("boundaries_and_scales", "scales"),
    ("boundaries", "boundaries"),
    ("schedules", "schedules"),
    ("cosine_kwargs", "cycles"),
    ("key", "object"),
    ("rules", "factors"),
    ("stacks", "stacks"),
    ("tx", TRANSFORMATION),
)
_WHOLE = re.compile(r"k|.*_(steps|period)")
_AT_LEAST_1 = re.compile(
    r"k|every_k_schedule|accumulation_size|rank|sync_period|memory_size|num_betas"
    r"|ns_steps|(decay|transition|max_\w+)_steps|update_(interval|proj_gap)"
)
# Rates of averages, at which 1 forgets nothing and more grows without end.
_BELOW_1 = re.compile(
    r"(\w+\.)?((adam_)?b[123]|beta3|betas|decay|momentum|rho)"
    r"|(scale_by_)?signum\.beta"
)
_AT_MOST = {"memory_size": 10_000, "num_betas": 100, "ns_steps": 100}
_MAY_BE_NEGATIVE = re.compile(
    r"(\w+\.)?(step_size|value|\w+_value|f_min|lower_bound|axis|ns_coeffs)"
    r"|add_decayed_weights\.weight_decay"
)
_CHOICES = {
    "initial_guess_strategy": ("keep", "one"),
    "interpolate_type": ("linear", "cosine"),
    "variant": ("sps", "sps+"),
}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a factory.

    Attributes:
        kind: how it is read; a method of ``building.Builder`` has this name.
        allows_none: whether ``"none"`` is None.
        default: of its parameter.
        choices: the texts that it may be; empty for any.
        length: of a tuple, if the annotation says it.
        least: of numbers; None for any.
        is_below_1: whether an average decays at this rate; its default may be 1.
        most: of whole numbers.
        fields: a NamedTuple of axes, for a table of patterns with those.
    """

    kind: str
    allows_none: bool = False
    default: Any = None
    choices: tuple[str, ...] = ()
    length: int | None = None
    least: int | None = 0
    is_below_1: bool = False
    most: int = LARGEST
    fields: Any = None

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Factory:
    """A function that a table may name, and what it returns.

    Attributes:
        name: the text of ``type``.
        call: the function.
        makes: ``"transformation"``, ``"schedule"``, or "" if only the result shows it.
    """

    name: str
    call: Callable[..., Any]
    makes: str = ""

    @functools.cached_property
    def arguments(self) -> Mapping[str, Argument]:
        """Its arguments by name."""
        return {
            each.name: _argument(self.name, each, is_ours=bool(self.makes))
            for each in signature_of(self.call).parameters.values()
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }

    def shared(
        self, each: Mapping[str, Any], table: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return those of some arguments that it has, and that a table lacks."""
        names = self.arguments.keys() - table.keys()
        return {name: value for name, value in each.items() if name in names}


@functools.cache
def factories() -> Mapping[str, Factory]:
    """Return all that a table may name; ``partition`` is of the file itself."""
    by_name = {}
    for module in (optax, optax.contrib):
        for name, function in sorted(vars(module).items()):
            makes = "" if name in REFUSED or name[0] == "_" else _returns(function)
            if makes and function.__module__.startswith("optax."):
                by_name[name] = Factory(name, function, makes)
    for name, function in _ADDED.items():
        by_name[name] = Factory(name, function, TRANSFORMATION)
    by_name[PARTITION] = Factory(PARTITION, lambda: None, TRANSFORMATION)
    return by_name


def _returns(function: Any) -> str:
    if not inspect.isfunction(function):
        return ""
    tx = optax.GradientTransformation
    promised = signature_of(function).return_annotation
    if isinstance(promised, type) and issubclass(promised, tx):
        return TRANSFORMATION
    return SCHEDULE if promised == optax.Schedule else ""


def _argument(owner: str, parameter: inspect.Parameter, *, is_ours: bool) -> Argument:
    """Say how an argument is read.

    Args:
        owner: name of the factory.
        parameter: of its signature.
        is_ours: whether the rules for Optax's names apply.
    """
    name, default = parameter.name, parameter.default
    words = {*type_names(parameter.annotation)}
    kind = _kind(parameter, words - {"NoneType"})
    least: int | None = 1 if _AT_LEAST_1.fullmatch(name) else 0
    if not is_ours or _MAY_BE_NEGATIVE.fullmatch(f"{owner}.{name}"):
        least = None
    members = typing.get_args(parameter.annotation)
    is_tuple = typing.get_origin(parameter.annotation) is tuple
    literals = [each for each in (parameter.annotation, *members) if _is_literal(each)]
    return Argument(
        kind,
        allows_none="NoneType" in words or default is None,
        default=default,
        choices=_CHOICES.get(name, tuple(t for x in literals for t in x.__args__)),
        length=len(members) if is_tuple else None,
        least=least,
        is_below_1=is_ours and bool(_BELOW_1.fullmatch(f"{owner}.{name}")),
        most=_AT_MOST.get(name, LARGEST),
        fields=next(filter(_is_dimension_numbers, members), None),
    )


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal


def _is_dimension_numbers(annotation: Any) -> bool:
    return getattr(annotation, "__name__", "").endswith("DimensionNumbers")


def _kind(parameter: inspect.Parameter, words: set[str]) -> str:
    name, default = parameter.name, parameter.default
    if any("GradientTransformation" in word for word in words):
        return TRANSFORMATION
    for pattern, kind in _BY_NAME:
        if re.fullmatch(pattern, name):
            return kind
    if "Callable" in words:
        if words == {"Callable"}:
            return SCHEDULE if parameter.annotation == optax.Schedule else "object"
        return "rate" if "float" in words else "count"
    if words == {"bool"} or isinstance(default, bool):
        return "bool"
    if "tuple" in words:
        return "axis" if "int" in words else "tuple"
    if words & {"str", "Literal"}:
        return "text"
    is_number = bool(words & {"float", "int", "number"})
    is_whole = type(default) is int or bool(_WHOLE.fullmatch(name))
    if words == {"int"} or (is_number and is_whole):
        return "whole"
    if is_number or isinstance(default, float):
        return "number"
    return "any" if words <= {"_empty", "Any"} else "object"
