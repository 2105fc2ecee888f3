"""Optax's own state classes: what their fields hold.

The only table in the package that knows the names of fields of a state. Params may be
called anything, so nothing here is asked of a class that is not Optax's.
"""

from __future__ import annotations

import optax

#: The field of ``PartitionState``: a dict of states by the label of the group.
GROUPS = "inner_states"

#: Fields that hold a dict whose keys are names of the state itself.
NAMED_FIELDS = frozenset({"hyperparams", "measurement", "measurements", "skip_state"})

#: The field of an injected state: a dict of the states of its schedules by name.
SCHEDULES = "hyperparams_states"

_LABELLED_FIELDS = frozenset({GROUPS, SCHEDULES})

#: These, and fields that hold a dict of states.
ENTRY_FIELDS = NAMED_FIELDS | _LABELLED_FIELDS

#: Fields that hold the state of another transformation, or parts with names. All others
#: hold params, what is computed of them, or numbers.
STATE_FIELDS = _LABELLED_FIELDS | {
    "adv_state",
    "base_optimizer_state",
    "fast_state",
    "hessian_fn_state",
    "info",
    "inner_opt_state",
    "inner_state",
    "measure_states",
    "opt_state",
    "skip_state",
}

#: Fields that a step is divided by, or scaled with: they grow with the gradients.
SCALE_FIELDS = frozenset(
    {
        "e_g",
        "exp_avg_sq",
        "grad_sum_of_squares",
        "grad_sum_sq",
        "max_dist",
        "n",
        "nu",
        "nu_max",
        "scale",
        "step_sizes",
        "sum_of_squares",
        "v",
        "v_col",
        "v_row",
    }
)

#: The moments that Adam corrects for their bias.
ADAM_FIELDS = frozenset({"mu", "nu"})

#: What a line search stores of its last step: the value, good only with the gradient.
STORED_FIELDS = ("value", "grad")

#: Fields that add up updates as they come from what is before them in a chain.
SUM_FIELDS = frozenset({"ema", "grad_acc", "previous_gradient", "trace"})

_NOT_STATES = (optax.LookaheadParams, optax.MaskedNode)


def is_state_class(cls: type) -> bool:
    """Return whether a class is that of a state in Optax.

    Example:
        >>> is_state_class(optax.ScaleByAdamState), is_state_class(optax.MaskedNode)
        (True, False)
    """
    return (
        cls.__module__.partition(".")[0] == "optax"
        and issubclass(cls, tuple)
        and cls not in _NOT_STATES
    )
