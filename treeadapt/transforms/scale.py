"""``scale_by_rules``: a factor for every leaf, without groups and without state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from treeadapt.errors import TransformError, TreeAdaptWarning
from treeadapt.selection.answers import Split
from treeadapt.selection.rules import BoundRules, Rules, RulesLike, as_rules
from treeadapt.selection.whole_tree import WholeTree
from treeadapt.transforms.adapt import is_transformation, run_flat
from treeadapt.transforms.flat import FlatDict, no_change, require_layers
from treeadapt.transforms.state_map import fast_params
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe

_LIKE_RATES = 0.01  # factors of layers begin below it, but end near 1


def scale_by_rules(rules: RulesLike) -> optax.GradientTransformationExtraArgs:
    """Multiply the update of every leaf by the value of its rule.

    Layer-wise rates without a group for each: put it last in a chain,
    ``optax.chain(optax.adamw(lr), ta.scale_by_rules({"blocks/0": 0.1, "**": 1.0}))``.

    Args:
        rules: ``Rules``, or a mapping or pairs for it, whose values are numbers; or
            one-dimensional arrays, broadcast along the leading axis of the leaf. With
            ``stacks`` a value is one number, for the layers that its rule decides.

    Returns:
        ``GradientTransformationExtraArgs`` for any tree, with ``optax.EmptyState``.
        Updates keep their dtype. A factor of 0 gives -0.0, whatever the update was (an
        infinity, a NaN): adding it keeps every bit.

    Raises:
        TransformError: a value is an optimizer or a schedule (named by its rule); or
            not a number, or an array whose length is not that of the leading axis, or
            an array for layers; or (by ``update``) several factors meet an update of
            another shape than its param, as the gradients of each example. These name
            the path.
        UnmatchedPathError: a leaf that trains has no rule.
        UnusedRuleError: (by ``init``) a pattern matches no array.

    Warns:
        TreeAdaptWarning: all factors are positive and below 0.01, as if they were
            learning rates; or one is negative, and another positive.

    Example:
        >>> tx = scale_by_rules({"a": 0.5, "**": [1.0, 10.0]})
        >>> updates = {"a": jnp.ones(2), "b": jnp.ones((2, 1))}
        >>> tx.update(updates, tx.init(updates))[0]["b"]
        Array([[ 1.],
               [10.]], dtype=float32)
    """
    factors = _read_factors(rules)

    def init(whole: WholeTree | None, params: Any) -> optax.EmptyState:
        if whole is not None:
            flat = fast_params(params)
            by_leaf = factors.answer(whole, list(flat))
            for (path, leaf), factor in zip(flat.items(), by_leaf, strict=True):
                _checked(path, leaf, factor)
        return optax.EmptyState()

    def update(
        whole: WholeTree, updates: FlatDict, state: Any, params: Any, _: FlatDict
    ) -> tuple[FlatDict, Any]:
        by_leaf = factors.answer(whole, list(updates))
        if params is not None:
            several = [
                path
                for path, factor in zip(updates, by_leaf, strict=True)
                if isinstance(factor, Split) or np.ndim(factor)
            ]
            require_layers(updates, fast_params(params), several)
        return {
            path: None if leaf is None else _scaled(path, leaf, factor)
            for (path, leaf), factor in zip(updates.items(), by_leaf, strict=True)
        }, state

    # It only scales what others move.
    return run_flat(factors, init, update, moving=lambda whole, flat: ())


def _read_factors(rules: Any) -> Rules | BoundRules:
    table = rules.rules if isinstance(rules, BoundRules) else as_rules(rules)
    values = (*table.values, table.default)
    for who, value in zip([*table.names[:-1], "default="], values, strict=True):
        if value is None:
            raise TransformError(
                f"None is not a factor ({who}). Write 1.0 for leaves that stay."
            )
        if is_transformation(value):
            raise TransformError(
                f"An optimizer is in the place of a factor ({who}). A factor is a "
                'number, such as 0.1; partition({"slow": optax.adam(1e-4), ...}, '
                '{pattern: "slow", ...}) runs optimizers by label.'
            )
        if callable(value):
            raise TransformError(
                f"A schedule or another function is in the place of a factor ({who}), "
                "which is a number. For a factor that changes: treeadapt."
                "inject_hyperparams(lambda rate: treeadapt.scale_by_rules("
                '{pattern: rate, "**": 1.0}))(schedule).'
            )
        if table.stacks and np.ndim(_as_array(value)):
            raise TransformError(
                f"The factors of a rule are several ({who}), and arrays hold layers. "
                "With stacks=, give each rule one number."
            )
    _warn_of_rates([*table.values, table.default])
    _warn_of_signs([*table.names[:-1], "default="], values)
    if isinstance(rules, BoundRules):
        return rules
    return Rules(
        [(where, _as_array(value)) for where, value in table.pairs],
        **table.options | {"default": _as_array(table.default)},
    )


def _warn_of_rates(values: Sequence[Any]) -> None:
    """Warn if all factors are as small as learning rates, and none turns the sign."""
    numbers = [x for x in values if isinstance(x, int | float) and x != 0]
    if numbers and min(numbers) > 0 and max(numbers) < _LIKE_RATES:
        warnings.warn(
            f"The largest factor of scale_by_rules is {max(numbers):g}. Factors "
            "multiply the updates: after optax.adam(1e-3), the factor 1e-4 trains at "
            "1e-7. Write them relative to the optimizer's rate, such as 0.1 and 1.0. "
            "They are rates after an optimizer whose own is 1.0, as in optax.chain("
            'optax.adam(1.0), ta.scale_by_rules({"**": 1e-4})), where this warning is '
            "of no concern; or, with a minus, after one without a rate, as "
            "optax.scale_by_adam().",
            TreeAdaptWarning,
            stacklevel=4,
        )


def _warn_of_signs(names: Sequence[str], values: Sequence[Any]) -> None:
    """Warn of negative factors, unless none is positive: then the minus is meant."""
    numbers = [
        (who, float(number))
        for who, value in zip(names, values, strict=True)
        if isinstance(value, int | float | list | tuple | np.ndarray | np.number)
        for number in _real_numbers(value)
    ]
    every = [number for _, number in numbers if number != 0]
    if not every or min(every) >= 0 or max(every) < 0:
        return
    who, number = min(numbers, key=lambda each: each[1])
    warnings.warn(
        f"The factor {number:g} of scale_by_rules ({who}) is negative. The updates of "
        "optax.adam(1e-3) point downhill already: with a minus, its leaves climb the "
        f"loss. Write {-number:g} to scale them, 0.0 for leaves that do not move. It "
        "is of no concern where gradients are reversed on purpose, or after an "
        "optimizer without a rate, as optax.scale_by_adam().",
        TreeAdaptWarning,
        stacklevel=4,
    )


def _real_numbers(value: Any) -> list[Any]:
    array = np.asarray(value)
    is_real = array.dtype.kind in "iuf" or jnp.issubdtype(array.dtype, jnp.floating)
    return array.ravel().tolist() if is_real else []


def _as_array(value: Any) -> Any:
    # A list would be a container to JAX.
    return np.asarray(value) if isinstance(value, list | tuple) else value


def _scaled(path: str, leaf: Any, factor: Any) -> jax.Array:
    """Return a leaf times its factor, and where that is 0 an update of nothing."""
    leaf = leaf if is_array(leaf) else jnp.asarray(leaf)
    scale = _checked(path, leaf, factor)
    values = _values(factor)
    if isinstance(values, jax.Array):  # its values are not looked at
        return _times(leaf, scale)
    with np.errstate(all="ignore"):
        is_zero = np.asarray(values).astype(leaf.dtype) == 0
    if is_zero.all():
        return no_change(leaf)
    return _times(leaf, scale) if is_zero.any() else leaf * scale


@jax.custom_jvp
def _times(leaf: jax.Array, scale: jax.Array) -> jax.Array:
    zeros = no_change(leaf)
    # The sum gives the condition the leaf's own sharding, as an Explicit mesh asks.
    return jnp.where(zeros + scale == 0, zeros, leaf * scale)


@_times.defjvp
def _times_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # The choice of zeros must not stop the derivative of a factor that is 0.
    return _times(*primals), jax.jvp(jnp.multiply, primals, tangents)[1]


def _checked(path: str, leaf: Any, factor: Any) -> jax.Array:
    """Return the factor of one leaf, in its dtype and shaped to multiply it."""
    values = _values(factor)
    if not _is_number(values, leaf.dtype):
        text = factor if isinstance(factor, Split) else repr(values)
        raise TransformError(
            f"The factor of {path!r}, {text}, is not a number that can scale "
            f"{leaf.dtype}.{_number_meant(values)}",
            paths=[path],
        )
    scale = jnp.asarray(values, leaf.dtype)
    if scale.ndim == 0:
        return scale
    if isinstance(factor, Split):
        sizes = factor.region.sizes
        axes = [each.axis for each in factor.region.along]
        if sizes != tuple(map(dict(enumerate(leaf.shape)).get, axes)):
            raise TransformError(
                f"The update of {path!r} is {describe(leaf)}, which does not hold the "
                f"layers of the param: {factor}.",
                paths=[path],
            )
        outer = sorted(range(len(axes)), key=axes.__getitem__)
        others = [axis for axis in range(leaf.ndim) if axis not in axes]
        return jnp.expand_dims(scale.reshape(sizes).transpose(outer), others)
    if scale.ndim > 1 or leaf.ndim == 0 or scale.shape[0] != leaf.shape[0]:
        raise TransformError(
            f"The factors of {path!r} have shape {scale.shape}, but the leaf has shape "
            f"{tuple(leaf.shape)}: give one factor for each entry of its leading axis.",
            paths=[path],
        )
    return scale.reshape(scale.shape + (1,) * (leaf.ndim - 1))


def _number_meant(values: Any) -> str:
    """Return what to write in the place of a text; nothing for what is not one."""
    if not isinstance(values, str):
        return ""
    if values == "frozen":
        return " Write 0.0 for leaves that do not move, or use treeadapt.freeze."
    return " Labels are for treeadapt.partition; write a number, such as 0.1."


def _values(factor: Any) -> Any:
    """Return the values of a factor: a number, or an array."""
    if not isinstance(factor, Split):
        return factor
    values = factor.values
    traced = any(isinstance(value, jax.Array) for value in values)
    try:
        array = jnp.stack(values) if traced else np.asarray(values)
    except (TypeError, ValueError):  # not numbers, or not of one shape
        return factor
    return array if jnp.issubdtype(array.dtype, jnp.number) else factor


def _is_number(values: Any, dtype: Any) -> bool:
    """Return whether ``values`` are numbers that ``dtype`` can hold."""
    if not (isinstance(values, int | float | complex) or is_array(values)):
        return False
    try:
        kind = jnp.result_type(values)
    except TypeError:  # an array of texts, or of objects
        return False
    is_complex = jnp.issubdtype(kind, jnp.complexfloating)
    takes = not is_complex or jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.issubdtype(kind, jnp.number) and takes
