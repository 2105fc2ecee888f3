"""What a function of a flat dict gives while an adapted transformation runs.

There, selectors and rules that are asked about a part of a tree decide on all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import optax

import treeadapt as ta

T = TypeVar("T")


def inside(tree: Any, ask: Callable[[Any], T], *, has_params: bool = True) -> T:
    """Return what ``ask`` gives of the flat dict of a tree.

    Args:
        tree: params, concrete or abstract.
        ask: called by ``init``, where rules without a use are errors.
        has_params: otherwise ``ask`` is called by an ``update`` that has no params:
            ``tree`` are gradients, and nothing is reported.
    """
    answers: list[T] = []

    def init(params: Any) -> Any:
        if has_params:
            answers.append(ask(params))
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        answers.append(ask(updates))
        return updates, state

    tx = ta.adapt(optax.GradientTransformation(init, update))
    state = tx.init(tree)
    if not has_params:
        tx.update(tree, state)
    (answer,) = answers
    return answer
