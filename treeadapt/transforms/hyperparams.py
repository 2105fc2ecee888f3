"""Hyperparameters in the state, without taking masks for schedules.

Takes a factory of transformations and gives one whose numbers and schedules live in the
state: Optax's ``inject_hyperparams``, which does the work. What is new is the choice of
what Optax gets to see: masks, labels, selectors and every other argument that is not
a number reach the factory as they are.
See ``state`` for which fields a state has.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from treeadapt.errors import TransformError
from treeadapt.selection.whole_tree import Question
from treeadapt.text.names import listing
from treeadapt.transforms.unlifted_masks import refuse_text_mask
from treeadapt.trees.arrays import is_array


def inject_hyperparams(
    inner_factory: Callable[..., Any],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: Any = None,
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Return a factory whose numbers and schedules are part of the state.

    As ``optax.inject_hyperparams``, with the same numbers and the same state, except
    that Optax calls every callable with the step count, a mask as well (which turns
    weight decay off and raises nothing), and traces every integer.

    A number is a hyperparameter, unless its parameter is annotated ``int`` (a size or a
    period). A callable is a schedule if the default of its parameter is a number, if
    the annotation is that of a number or a schedule, or if there is neither and the
    name does not look like ``*mask*``, ``*labels*`` or ``*_fn``. ``schedule(fn)`` says
    that it is one; ``static_args`` says that it is not. Selectors, rules, callable
    modules of masks, classes, bools, strings and everything else reach the factory as
    they are.

    Args:
        inner_factory: function that returns an Optax transformation.
        static_args: names of parameters that are not hyperparameters.
        hyperparam_dtype: dtype of all floating-point hyperparameters; without it, the
            widest dtype of the params; of complex params, that of their real part.

    Returns:
        Function with the parameters of ``inner_factory``, whose result is a
        transformation with state ``optax.InjectStatefulHyperparamsState``. On a raw
        model it works inside ``adapt``, as every transformation does.

    Raises:
        TransformError: ``inner_factory`` is not a function, or ``static_args`` names no
            parameter; a mask is a text, which Optax takes for True; or, when it runs, a
            schedule does not return a number.

    Example:
        >>> make = inject_hyperparams(optax.adamw)
        >>> tx = make(0.1, weight_decay=0.5, mask=lambda p: {"b": False, "w": True})
        >>> state = tx.init({"b": jnp.ones(2), "w": jnp.ones(2)})
        >>> state.hyperparams["learning_rate"]
        Array(0.1, dtype=float32)
        >>> "mask" in state.hyperparams
        False
    """
    if not callable(inner_factory):
        raise TransformError(
            "inject_hyperparams takes the function that makes a transformation: "
            f"inject_hyperparams(optax.adam)(1e-3); got {inner_factory!r:.100}."
        )
    signature = signature_of(inner_factory)
    static = frozenset({static_args} if isinstance(static_args, str) else static_args)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    unknown = sorted(static - set(signature.parameters))
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise TransformError(
            f"static_args names {listing(unknown)}, but the factory has the parameters "
            f"{listing(signature.parameters, limit=20)}."
        )

    @functools.wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        keywords = bound.kwargs
        injected: dict[str, Any] = {}
        for name, value in (bound.arguments | keywords).items():
            refuse_text_mask(name, value)
            parameter = _parameter(signature, name)
            if name not in static and _is_injected(parameter, value):
                injected[name] = _shown(name, value)

        def inner(**hyperparams: Any) -> Any:
            new = copy.copy(bound)
            new.arguments = {  # a keyword may have the name of ``*args``, too
                n: x if n in keywords else hyperparams.get(n, x)
                for n, x in bound.arguments.items()
            }
            more = {n: hyperparams.get(n, x) for n, x in keywords.items()}
            return inner_factory(*new.args, **more)

        # Optax 0.2.8 injects what it finds in the signature, and nothing else
        # (optax/schedules/_inject.py, there the other workarounds of this file, too).
        inner.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, _KEYWORD) for name in injected]
        )

        def inject(dtype: Any) -> optax.GradientTransformationExtraArgs:
            return optax.inject_hyperparams(inner, hyperparam_dtype=dtype)(**injected)

        plain = inject(hyperparam_dtype)

        def fitting(params: Any) -> optax.GradientTransformationExtraArgs:
            dtype = _real_dtype(params) if hyperparam_dtype is None else None
            return plain if dtype is None else inject(dtype)

        def init(params: Any) -> Any:
            return fitting(params).init(params)

        def update(
            updates: Any, state: Any, params: Any | None = None, **extra: Any
        ) -> tuple[Any, Any]:
            return fitting(params).update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(init, update)

    return make


def _real_dtype(params: Any) -> Any | None:
    """Return the real dtype of the widest params if that is complex, else None.

    Optax 0.2.8 takes the widest dtype of the params. A complex learning rate is none,
    and makes moments of real params complex at the first step.
    """
    widest = optax.tree_utils.tree_dtype(params, "highest")
    is_complex = jnp.issubdtype(widest, jnp.complexfloating)
    return jnp.finfo(widest).dtype if is_complex else None


def schedule(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Say that a callable is a schedule, wherever ``inject_hyperparams`` meets it.

    Args:
        fn: function from the step count (an integer array of shape ``()``) to a number,
            or a stateful schedule (``optax.schedules.StatefulSchedule``).

    Returns:
        Callable that does what ``fn`` does.

    Raises:
        TransformError: ``fn`` cannot be called.

    Example:
        >>> def make(fn):  # a parameter that says nothing of what it takes
        ...     return optax.scale(fn)
        >>> halve = schedule(lambda count: 0.5**count)
        >>> tx = inject_hyperparams(make)(fn=halve)
        >>> tx.init(jnp.ones(2)).hyperparams["fn"]
        Array(1., dtype=float32)
    """
    if not callable(fn):
        raise TransformError(
            f"schedule takes a function of the step count, got {fn!r:.100}."
        )
    return _Schedule(fn)


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """A callable that a person says is a schedule."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def _is_injected(parameter: inspect.Parameter, value: Any) -> bool:
    """Return whether an argument is a hyperparameter: a number or a schedule."""
    # Optax 0.2.8 takes every callable for a schedule, masks too (optax#1373, optax#57),
    # and traces every integer, sizes too (optax#412).
    if callable(value):
        return isinstance(value, _Schedule) or _is_schedule(parameter, value)
    if isinstance(value, bool) or getattr(value, "dtype", None) == jnp.bool_:
        return False
    if isinstance(value, int | np.integer):
        types = set(type_names(parameter.annotation)) - _NO_TYPES
        return types != {"int"}
    return isinstance(value, int | float | jax.Array | np.ndarray | np.number)


def _is_schedule(parameter: inspect.Parameter, value: Any) -> bool:
    if isinstance(value, Question):
        return False
    if _takes_number(parameter):
        return True
    if _NO_SCHEDULE.search(parameter.name):
        return False
    if isinstance(value, optax.schedules.StatefulSchedule):
        return True
    is_plain = parameter.annotation is _EMPTY or parameter.annotation is Any
    is_open = is_plain and parameter.default is _EMPTY
    # A module is called, too; a function is a leaf.
    is_function = isinstance(value, jtu.Partial) or jtu.all_leaves((value,))
    return is_open and is_function and not isinstance(value, type)


_EMPTY = inspect.Parameter.empty
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_NO_SCHEDULE = re.compile(r"mask|labels|_fn$")


def _takes_number(parameter: inspect.Parameter) -> bool:
    """Return whether the default or the annotation of a parameter says "a number"."""
    default = parameter.default
    if isinstance(default, numbers.Number) and not isinstance(default, bool):
        return True
    words = set(type_names(parameter.annotation))
    return bool(words & _NUMBERS) and words <= _NUMBERS | _BESIDE_NUMBERS


def type_names(annotation: Any) -> Iterator[str]:
    """Yield the names of the types that an annotation allows, by whatever way."""
    annotation = getattr(annotation, "__value__", annotation)  # type X = ...
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    for member in typing.get_args(annotation) if is_union else (annotation,):
        name = getattr(typing.get_origin(member) or member, "__name__", "")
        # jax.Array is called jaxlib._jax.Array; float32 is a float.
        yield name.rpartition(".")[2].rstrip("0123456789")


_NO_TYPES = frozenset({"None", "NoneType", "Optional", "Union"})
_NUMBERS = frozenset({"Array", "ArrayLike", "ScalarOrSchedule", "ndarray", "number"})
_NUMBERS |= {"complex", "float", "int", "uint"}
# A JAX may count classes of its own among what is like an array.
_BESIDE_NUMBERS = _NO_TYPES | {"bool", "Callable", "Schedule"}
_BESIDE_NUMBERS |= set(type_names(jax.typing.ArrayLike))


def _shown(name: str, value: Any) -> Any:
    """Return a hyperparameter as Optax knows it."""
    if isinstance(value, _Schedule):
        return _shown(name, value.fn)
    if isinstance(value, np.number):
        # Optax 0.2.8 injects no NumPy scalars but ``float64``, which is a float.
        return np.asarray(value)
    if not callable(value) or isinstance(value, optax.schedules.StatefulSchedule):
        return value
    return functools.partial(_checked, name, value)


def _checked(name: str, fn: Callable[..., Any], count: Any) -> Any:
    """Call a schedule and refuse what is not a number."""
    try:
        value = fn(count)
    except Exception as error:
        error.add_note(
            f"{name!r} was called as a schedule, with the step count. If it is not "
            "one, name it in static_args of inject_hyperparams."
        )
        raise
    is_number = is_array(value) or isinstance(value, numbers.Number)
    if not is_number or jnp.result_type(value) == jnp.bool_:
        raise TransformError(
            f"{name!r} was called as a schedule and returned {value!r:.100}, not a "
            f"number. If it is not one, pass static_args=({name!r},)."
        )
    return value


def signature_of(factory: Callable[..., Any]) -> inspect.Signature:
    """Return the signature, in which a name for type checkers alone is ``Any``.

    Annotations that are texts are read; if that fails, there are none.

    Example:
        >>> def make(every: int):
        ...     return optax.scale(every)
        >>> list(type_names(signature_of(make).parameters["every"].annotation))
        ['int']
    """
    names: dict[str, Any] = {}
    while True:
        try:
            signature = inspect.signature(factory, eval_str=True, locals=names)
            break
        except NameError as error:
            name = str(error.name)
            if name in names:
                return _without_annotations(inspect.signature(factory))
            names[name] = Any
        except (AttributeError, TypeError, SyntaxError):
            return _without_annotations(inspect.signature(factory))
    # Quotes in a module whose annotations are texts anyway.
    return _without_annotations(signature, lambda each: isinstance(each, str))


def _without_annotations(
    signature: inspect.Signature, drops: Callable[[Any], bool] = lambda _: True
) -> inspect.Signature:
    parameters = [
        each.replace(annotation=_EMPTY) if drops(each.annotation) else each
        for each in signature.parameters.values()
    ]
    if drops(signature.return_annotation):
        return inspect.Signature(parameters)
    return signature.replace(parameters=parameters)


def _parameter(signature: inspect.Signature, name: str) -> inspect.Parameter:
    """Return the parameter that takes an argument: the last one if it has no name."""
    *_, last = signature.parameters.values()
    parameter = signature.parameters.get(name)
    return last.replace(name=name, kind=_KEYWORD) if parameter is None else parameter
