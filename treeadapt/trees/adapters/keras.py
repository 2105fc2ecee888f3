"""Keras 3 on JAX: Variables are boxes; a layer or a model gives them by their path.

A Variable keeps the path that Keras gave it (``sequential/dense/kernel``), so that is
its key in a layer, a model or an optimizer, whatever holds it there. One Variable under
two paths is one leaf. Those with ``trainable=False`` do not train. Only Keras makes
layers, from their configuration, so they are read here and never rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras

from treeadapt.errors import AdapterError
from treeadapt.trees.adapters import fields
from treeadapt.trees.adapters.adapter import BOX, Adapter, Flat
from treeadapt.trees.arrays import is_array

_SEED = "seed_generator_state"  # of each keras.random.SeedGenerator (Keras 3.15)


def _variable(node: Any) -> Flat:
    # The second is that of a Variable which is one of nnx, too (Keras 3).
    flat = fields.picked(node, ("_value", "_raw_value"))
    return flat._replace(keys=(BOX,) * len(flat.keys))


def _variable_again(aux: fields.Shell, children: Sequence[Any]) -> Any:
    node = fields.put_together(aux, children)
    (value,) = children
    if is_array(value):  # its own notes of what it holds
        dtype = keras.backend.standardize_dtype(value.dtype)
        notes = {"_shape": value.shape, "_ndim": value.ndim, "_dtype": dtype}
        fields.set_attributes(node, notes.items())
    return node


def _owner(node: Any) -> Flat:
    variables = node.variables
    if not (variables or node.built):
        raise AdapterError(
            f"The {type(node).__name__} {node.name!r} is not built, so it has no "
            "variables yet. Call it on data, or call its build method, first."
        )
    return Flat([variable.path for variable in variables], variables, node)


def _owner_again(aux: Any, _: Sequence[Any]) -> NoReturn:
    raise AdapterError(
        f"Only Keras makes a {type(aux).__name__}, so {aux.name!r} cannot be rebuilt "
        "around other leaves. Use the dict that treeadapt.split or to_flat_dict gives. "
        "In a loss, model.stateless_call(...) takes its values as lists; "
        "v.assign(flat[v.path]), for each v of model.variables, puts them in the model."
    )


ADAPTERS = (
    Adapter(
        name="Keras Variable",
        applies=keras.Variable,
        flatten=_variable,
        unflatten=_variable_again,
        trains=lambda node: node.trainable,
        random=lambda node: node.name == _SEED and not node.trainable,
        shared=True,
    ),
    Adapter(
        name="Keras layer",
        applies=lambda cls: issubclass(cls, keras.Layer | keras.Optimizer),
        flatten=_owner,
        unflatten=_owner_again,
    ),
)
