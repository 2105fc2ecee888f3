"""Optax's own state classes: what their fields hold.

The only table in the package that knows the names of fields of a state. Params may be
called anything, so nothing here is asked of a class that is not Optax's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import optax

#: The field of ``PartitionState``: a dict of states by the label of the group.
GROUPS = "inner_states"

#: Fields that hold a dict whose keys are names of the state itself.
NAMED_FIELDS = frozenset({"hyperparams", "measurement", "measurements", "skip_state"})

#: The field of an injected state: a dict of the states of its schedules by name.
SCHEDULES = "hyperparams_states"

#: Fields that hold a dict of states.
LABELLED_FIELDS = frozenset({GROUPS, SCHEDULES})

#: Fields that hold the state of another transformation, or parts with names. All others
#: hold params, what is computed of them, or numbers.
STATE_FIELDS = LABELLED_FIELDS | {
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

#: The moments that Adam corrects for their bias.
ADAM_FIELDS = frozenset({"mu", "nu"})

#: What a line search stores of its last step: the value, good only with the gradient.
STORED_FIELDS = ("value", "grad")

#: Fields that add up updates as they come from what is before them in a chain.
SUM_FIELDS = frozenset({"ema", "grad_acc", "previous_gradient", "trace"})

#: Fields that hold params, or averages of them: what is added to a parameter is added.
PARAM_FIELDS = frozenset({"cache", "init_params", "params", "params0", "x0", "z"})

#: The power of a factor on a param that is one on a field of its state. With ``c * p``
#: in the place of ``p``, gradients are divided by ``c``; what that makes of a field is
#: in the update of its class, in the source of Optax 0.2.8. Left out is what depends on
#: more than the field: the ``ema`` of params or of updates. A test trains with and
#: without a factor and compares, and another goes through all states that Optax has.
DEGREES = {
    field: degree
    for degree, fields in (
        # The mean of squared steps, by which ADADELTA has steps in units of the params
        # (arXiv:1212.5701, section 3.2).
        (2, ("e_x",)),
        # Params, of an earlier step or as means; L-BFGS keeps their differences.
        (1, (*PARAM_FIELDS, "diff_params_memory")),
        # The last gradient, or its difference to the one before.
        (-1, ("g", "grad", "previous_gradient", "updates", "diff_updates_memory")),
        # Sums of gradients: of MultiSteps and apply_every; of MADGRAD (``s``), D-Adapt
        # and Prodigy, weighted by numbers that all params share.
        (-1, ("acc_grads", "grad_acc", "s", "grad_sum")),
        # Moving means of gradients; of Adan also of their differences (``v``).
        (-1, ("exp_avg", "m", "m1", "m2", "mu", "trace", "v")),
        # Sums of squared gradients: of AdaGrad, and of MADGRAD, weighted.
        (-2, ("sum_of_squares", "grad_sum_sq")),
        # Moving means of squares, and their maximum. That of Sophia is of the diagonal
        # of the Hessian, which is divided by the factor twice, too.
        (-2, ("e_g", "exp_avg_sq", "n", "nu", "nu_max")),
    )
    for field in fields
}

#: Fields that a step is divided by, or scaled with: they grow with the gradients.
SCALE_FIELDS = frozenset(
    {
        *(field for field, degree in DEGREES.items() if degree == -2),
        *("grad_sum_of_squares", "max_dist", "scale", "step_sizes"),
        *("v", "v_col", "v_row"),
    }
)

#: Fields that hold arrays by the names of the params.
COPY_FIELDS = SCALE_FIELDS.union(DEGREES)

# Of these classes the table does not hold: they normalize, or keep other statistics.
_OTHER_DEGREES = ("FactoredState", "ScaleByNovogradState", "ScaleBySM3State")

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


def has_fields(cls: type) -> bool:
    """Return whether a class has fields, as a named tuple or a dataclass has.

    Example:
        >>> has_fields(optax.ScaleByAdamState), has_fields(dict)
        (True, False)
    """
    return hasattr(cls, "_fields") or dataclasses.is_dataclass(cls)


def degree_of(
    classes: Iterable[type], field: str, *, is_scaled: bool = False
) -> int | None:
    """Return the power of a factor on the params that is one on a field of a state.

    Args:
        classes: of the state.
        field: name of the field.
        is_scaled: whether what it adds up may have been scaled by other fields.

    Returns:
        The power; None if it is not known.

    Example:
        >>> degree_of([optax.ScaleByAdamState], "nu")
        -2
    """
    names = [cls.__name__ for cls in classes if is_state_class(cls)]
    is_known = names and names[0] not in _OTHER_DEGREES
    is_known = is_known and not (is_scaled and field in SUM_FIELDS)
    return DEGREES.get(field) if is_known else None
