"""penzai: variables, variable values and named arrays are boxes.

The path of a parameter is where it is in the model, as in every other library;
``NamedArray`` and variable wrappers add no segment. A variable has an identity: one
Parameter used twice is one leaf. Only parameters train; state variables do not.
"""

from __future__ import annotations

from typing import Any

from penzai.core import named_axes, variables

from treeadapt.trees.adapters import fields, jax
from treeadapt.trees.adapters.adapter import BOX, Adapter, Flat


def _variable(node: Any) -> Flat:
    return fields.picked(node, ("_raw_value",))._replace(keys=(BOX,))


def _trains(node: Any) -> bool:
    return not isinstance(node, variables.StateVariable | variables.StateVariableValue)


def _axis_names(node: Any) -> list[str | None]:
    if isinstance(node, named_axes.NamedArrayView):
        by_axis = {axis: name for name, axis in node.data_axis_for_name.items()}
        return [by_axis.get(axis) for axis in range(len(node.data_shape))]
    rank = len(node.positional_shape)  # of the axes in front
    return [*[None] * rank, *node.named_axes]


ADAPTERS = (
    Adapter(
        name="penzai variable",
        applies=variables.LabeledVariable,
        flatten=_variable,
        unflatten=fields.put_together,
        trains=_trains,
        shared=True,
    ),
    Adapter(
        name="penzai variable value",
        applies=variables.LabeledVariableValue,
        flatten=jax.boxed,
        trains=_trains,
    ),
    Adapter(
        name="penzai NamedArray",
        applies=named_axes.NamedArrayBase,
        flatten=jax.boxed,
        axis_names=_axis_names,
    ),
)
