"""Write ``docs/compatibility.md``: every Optax transformation on every kind of tree.

The transformations are found in Optax's public namespaces, so a new one shows up by
itself. The kinds of trees are the table that the tests share, ``tests/trees.py``. A
cell asks one thing: is the program of an update the one that JAX traces for the same
transformation on the flat dict? Programs are compared as text, so equal ones give equal
bits in every step, compiled or not, and a table of thousands of cells costs only
traces. If the text differs, both are compiled, run for several steps and compared bit
for bit.

A table of its own compares layers inside a scan with the unrolled model, by numbers.
The two tables with a row for each transformation are pages in ``docs/compatibility``.

Run ``python docs/scripts/compatibility.py`` (a few minutes on two cores).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import logging
import platform
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import treeadapt as ta
from treeadapt.errors import NoArraysError
from treeadapt.transforms.flat import trained
from treeadapt.trees.views import view_tree

REPOSITORY = Path(__file__).parent.parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from programs import (  # noqa: E402
    Case,
    Flat,
    Step,
    bits,
    flat_params,
    numbers,
    program,
    reference,
)
from stacked import distance  # noqa: E402
from trees import TREES, Row  # noqa: E402

DOCS = REPOSITORY / "docs"
SPACES = (optax, optax.transforms, optax.contrib)
#: A helper that is not a transformation, and a deprecated name.
NO_ROWS = ("with_extra_args_support", "inject_stateful_hyperparams")
STEPS = 4

SAME, SAME_BITS, OTHER, FAILS = "=", "≈", "≠", "x"
UNDEFINED, REFUSED = "-", "r"
FAILURES = {OTHER: "other numbers", FAILS: "raises"}

LINE_SEARCH = ("value", "grad", "value_fn")
#: Extra arguments of updates, passed only if an update requires them.
EXTRAS = ((), ("value",), LINE_SEARCH, ("obj_fn",), ("grad_fn",))


def _adam() -> Any:
    return optax.adam(0.1)


def _halved(count: Any) -> Any:
    return 0.5**count


def _every_other(step: Any) -> Any:
    return step % 2 == 0


def _all_true(tree: Any) -> Any:
    return jax.tree.map(lambda _: True, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "m" if jnp.ndim(leaf) > 1 else "v", tree)


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) == 2, tree)


def _matrix_axes(tree: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)


def _per_example(tx: Any) -> Any:
    """Give a transformation of the gradients of two examples two."""

    def two(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), updates)

    return optax.chain(optax.stateless(two), tx)


def _norm(tree: Any) -> Any:
    return optax.tree.norm(tree)


#: Values for parameters that have no default, by name of the parameter.
ARGUMENTS: dict[str, Any] = {
    "adv_optimizer": lambda: optax.sgd(0.1),
    "base_optimizer": _adam,
    "clipping": lambda: 0.1,
    "decay": lambda: 0.9,
    "eta": lambda: 0.1,
    "every_k_schedule": lambda: 2,
    "fast_optimizer": _adam,
    "freeze_mask": lambda: False,
    "gamma": lambda: 0.5,
    "inner": _adam,
    "inner_factory": lambda: optax.adamw,
    "k": lambda: 2,
    "key": lambda: jax.random.key(0),
    "l2_norm_clip": lambda: 1.0,
    "learning_rate": lambda: 0.1,
    "mask": lambda: _all_true,
    "max_backtracking_steps": lambda: 3,
    "max_consecutive_errors": lambda: 3,
    "max_delta": lambda: 1.0,
    "max_linesearch_steps": lambda: 3,
    "max_norm": lambda: 1.0,
    "measure": lambda: _norm,
    "measure_name": lambda: "norm",
    "measures": lambda: {"norm": _norm},
    "noise_multiplier": lambda: 0.1,
    "opt": _adam,
    "optimizer": _adam,
    "param_labels": lambda: _labels,
    "should_transform_fn": lambda: _every_other,
    "slow_step_size": lambda: 0.5,
    "step_size": lambda: -0.1,
    "step_size_fn": lambda: _halved,
    "sync_period": lambda: 2,
    "threshold": lambda: 1.0,
    "transforms": lambda: {"m": optax.adam(0.1), "v": optax.sgd(0.1)},
}

#: Arguments by name of the function, where its parameters' names do not say enough.
CALLS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "add_noise": lambda fn: fn(0.1, 0.5, key=jax.random.key(0)),
    "chain": lambda fn: fn(optax.clip_by_global_norm(1.0), _adam()),
    "differentially_private_aggregate": lambda fn: _per_example(
        fn(1.0, 0.1, key=jax.random.key(0))
    ),
    "dpsgd": lambda fn: _per_example(fn(0.1, 1.0, 0.1, seed=0)),
    "galore": lambda fn: fn(0.1, rank=1),
    "inject_hyperparams": lambda fn: fn(optax.adamw)(_halved, weight_decay=0.5),
    "named_chain": lambda fn: fn(("clip", optax.clip(1.0)), ("adam", _adam())),
    "noisy_sgd": lambda fn: fn(0.1, key=jax.random.key(0)),
    "scale_by_galore": lambda fn: fn(rank=1),
    "scale_by_muon": lambda fn: optax.masked(
        fn(weight_dimension_numbers=_matrix_axes), _matrices
    ),
    "stateless": lambda fn: fn(lambda updates, params: updates),
    "stateless_with_tree_map": lambda fn: fn(lambda update, param: update),
}


def _backtracking() -> Any:
    return optax.scale_by_backtracking_linesearch(3, store_grad=True)


def _multi_steps(inner: Any) -> Any:
    return optax.MultiSteps(inner, 2)


# : Uses that a plain call of a function does not cover.
USES: dict[str, Callable[[], Any]] = {
    "lbfgs(linesearch=backtracking)": lambda: optax.lbfgs(linesearch=_backtracking()),
    "lbfgs(linesearch=None)": lambda: optax.lbfgs(0.1, linesearch=None),
    "lookahead(reset_state=True)": lambda: optax.lookahead(
        optax.chain(optax.zero_nans(), _adam()), 2, 0.5, reset_state=True
    ),
    "contrib.sam(opaque_mode=True)": lambda: optax.contrib.sam(
        _adam(), optax.sgd(0.1), opaque_mode=True
    ),
    "contrib.sam(zero_nans)": lambda: optax.contrib.sam(
        _adam(), optax.chain(optax.zero_nans(), optax.sgd(0.1))
    ),
    "MultiSteps(zero_nans)": lambda: _multi_steps(
        optax.chain(optax.zero_nans(), _adam())
    ),
    "MultiSteps(masked)": lambda: _multi_steps(optax.masked(_adam(), _all_true)),
    "MultiSteps(skip_not_finite)": lambda: optax.MultiSteps(
        _adam(), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "adamw(mask=)": lambda: optax.adamw(0.1, weight_decay=0.5, mask=_all_true),
    "apply_if_finite(lbfgs)": lambda: optax.apply_if_finite(optax.lbfgs(), 3),
    "flatten(chain)": lambda: optax.flatten(
        optax.chain(optax.clip_by_global_norm(1.0), _adam())
    ),
    "inject_hyperparams(lbfgs)": lambda: optax.inject_hyperparams(
        optax.lbfgs, static_args=("memory_size", "scale_init_precond", "linesearch")
    )(0.1),
    "named_chain of wrappers": lambda: optax.named_chain(
        ("nans", optax.zero_nans()),
        ("masked", optax.masked(optax.trace(0.9), _all_true)),
        ("finite", optax.apply_if_finite(_adam(), 3)),
    ),
    "treeadapt.inject_hyperparams": lambda: _ta("hyperparams").inject_hyperparams(
        optax.adamw
    )(_halved, weight_decay=0.5, mask=_all_true),
}


def _ta(room: str) -> Any:
    return __import__(f"treeadapt.transforms.{room}", fromlist=["_"])


def public_names() -> dict[str, Callable[..., Any]]:
    """Find the functions of Optax that return transformations.

    Returns:
        ``{name: function}``; those of ``contrib`` keep that prefix. A function without
        a return annotation counts if a call with known arguments returns a
        transformation.
    """
    found: dict[str, Callable[..., Any]] = {}
    known: set[int] = set()
    for space in SPACES:
        prefix = "contrib." if space is optax.contrib else ""
        for name in dir(space):
            fn = getattr(space, name)
            if name.startswith("_") or id(fn) in known or not _is_factory(name, fn):
                continue
            known.add(id(fn))
            found[prefix + fn.__name__] = fn  # multi_transform is partition
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _is_factory(name: str, fn: Any) -> bool:
    if fn is optax.MultiSteps:
        return True
    if not inspect.isfunction(fn) or name in NO_ROWS:
        return False
    returns = inspect.signature(fn).return_annotation
    if returns is inspect.Signature.empty:
        try:
            return isinstance(build(name, fn), optax.GradientTransformation)
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
    return "GradientTransformation" in str(returns)


def build(name: str, fn: Callable[..., Any]) -> Any:
    """Call a function of Optax with its required arguments.

    Raises:
        KeyError: a parameter is not in the table.
    """
    if name in CALLS:
        return CALLS[name](fn)
    needed = {
        parameter.name: ARGUMENTS[parameter.name]()
        for parameter in inspect.signature(fn).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return fn(**needed)


def cases() -> tuple[list[Case], dict[str, str]]:
    """Return the table's rows, and what is left out, with the reason."""
    makers: dict[str, Callable[[], Any]] = {
        name: functools.partial(build, name.removeprefix("contrib."), fn)
        for name, fn in public_names().items()
    }
    found, without = [], {}
    for name, make in (makers | USES).items():
        try:
            found.append(_case(name, make))
        except _UndefinedError as error:
            without[name] = str(error)
    return found, without


class _UndefinedError(Exception):
    """A transformation that does not run on a flat dict of two layers either."""


def _case(name: str, make: Callable[[], Any]) -> Case:
    """Find the extra arguments that the update of a transformation needs."""
    tree = {"a/b": jnp.ones(3), "a/w": jnp.ones((2, 3))}
    reason = ""
    for lookahead in (False, True):
        for extra in EXTRAS:
            case = Case(name, make, extra, lookahead)
            try:
                step = reference(case, tree)
                jax.eval_shape(step, tree, step.init(tree), tree)
                return case
            except Exception as error:  # noqa: BLE001  of whatever kind
                reason = reason or first_line(error)
    raise _UndefinedError(reason)


def first_line(error: BaseException) -> str:
    """Return the start of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:100]


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of one transformation on one kind of tree."""

    native: str
    ours: str
    reason: str = ""  # why native Optax fails


@functools.cache
def on_flat_dict(case: Case, signature: Any) -> tuple[Any, list[str]] | None:
    """State and programs of Optax itself on a flat dict; None if it fails there."""
    flat = {path: jnp.zeros(shape, dtype) for path, shape, dtype in signature}
    params = numbers(flat, 0.5)
    try:
        step = reference(case, flat)
        state = step.init(params)
        return bits(state), programs(step, state, params)
    except Exception:  # noqa: BLE001  of whatever kind
        return None


def programs(step: Step, state: Any, params: Flat) -> list[str]:
    """Return the programs of as many steps as the state's types need to settle."""
    grads = numbers(params, 1.0)
    found: list[str] = []
    while len(found) < STEPS:
        found.append(program(step, grads, state, params))
        _, new = jax.eval_shape(step, grads, state, params)
        if types(new) == types(state):
            break
        state = new
    return found


def types(tree: Any) -> Any:
    """Return structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


@functools.cache
def made(row: Row) -> Any:
    """Make the tree of a row, once."""
    return row.make()


def cell(case: Case, row: Row) -> Cell:
    """Compare Optax and this library for one transformation on one kind of tree."""
    tree = made(row)
    try:
        params = flat_params(tree)
        ours = ta.adapt(case.make())
    except NoArraysError:
        return Cell(UNDEFINED, UNDEFINED)
    native, reason = _native(case, tree, params)
    if row.opaque:
        return Cell(native, _refusal(ours, tree), reason)
    signature = tuple((p, x.shape, str(x.dtype)) for p, x in sorted(params.items()))
    want = on_flat_dict(case, signature)
    if want is None:
        return Cell(UNDEFINED, UNDEFINED)
    return Cell(native, _adapted(case, tree, ours, params, want), reason)


def _native(case: Case, tree: Any, params: Flat) -> tuple[str, str]:
    try:
        step = Step(case, tree, case.make())
        state = step.init(params)
        for _ in range(2):
            _, state = jax.eval_shape(step, params, state, params)
    except Exception as error:  # noqa: BLE001  of whatever kind
        return FAILS, first_line(error)
    return SAME, ""


def _refusal(tx: Any, tree: Any) -> str:
    try:
        tx.init(tree)
    except ta.TransformError as error:
        return REFUSED if "one leaf" in str(error) else FAILS
    return OTHER


def _adapted(case: Case, tree: Any, tx: Any, params: Flat, want: Any) -> str:
    step = Step(case, tree, tx)
    try:
        state = step.init(params)
        if (bits(state), programs(step, state, params)) == want:
            return SAME
    except Exception:  # noqa: BLE001  of whatever kind
        return FAILS
    return _compare_bits(step, reference(case, params), params)


def _compare_bits(step: Step, want: Step, params: Flat) -> str:
    def run(step: Step) -> Any:
        state, seen, update = step.init(params), [], jax.jit(step)
        for index in range(STEPS):
            updates, state = update(numbers(params, float(index)), state, params)
            seen.append(updates)
        return bits((seen, state))

    return SAME_BITS if run(step) == run(want) else OTHER


# A mask function that reads paths


def ends_in_w(tree: Any) -> Any:
    """Mask leaves by their last key, as users do."""
    return jax.tree.map_with_path(
        lambda keys, _: bool(keys) and str(keys[-1]).strip("[].'\"") == "w", tree
    )


def mask_cell(row: Row, mask: Any) -> str:
    """Return whether a mask inside ``adapt`` decays only the leaves called ``w``."""
    tree = made(row)
    case = Case("masked", lambda: optax.adamw(0.1, weight_decay=0.5, mask=mask))
    params = flat_params(tree)
    named = {path: path.rpartition("/")[2] == "w" for path in params}
    meant = dataclasses.replace(
        case, make=lambda: optax.adamw(0.1, weight_decay=0.5, mask=named)
    )
    zeros = {path: jnp.zeros_like(leaf) for path, leaf in params.items()}
    steps = Step(case, tree, ta.adapt(case.make())), reference(meant, params)
    try:
        got, want = (step(zeros, step.init(params), params)[0] for step in steps)
    except (TypeError, ValueError):
        return FAILS
    return SAME if bits(got) == bits(want) else OTHER


# State that keeps its types


def changes_type(case: Case) -> bool:
    """Return whether Optax's own state on a flat dict fails to scan."""
    flat = flat_params({"a": {"b": jnp.ones(3), "w": jnp.ones((2, 3))}})
    step = Step(case, flat, case.make())
    state = jax.eval_shape(step.init, flat)
    _, new = jax.eval_shape(step, flat, state, flat)
    return types(new) != types(state)


def keeps_type(case: Case) -> bool:
    """Return whether the adapted state scans."""
    return not changes_type(
        dataclasses.replace(case, make=lambda: ta.adapt(case.make()))
    )


# Layers inside a scan

#: Numbers of layers: fewer, and more, than some axes of a layer have entries.
LAYERS = (3, 7)
#: How far apart in float32 two orders of summation are.
ROUNDING = 1e-6
#: Arguments by name of the function, where those of the other tables change nothing in
#: leaves as small as these.
LAYER_CALLS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=2
    ),
}
#: How stacked layers compare with the unrolled model.
BITS, DIFFERS, REFUSES = "same bits", "no", "refused"


def layers_cell(case: Case, *, by_layer: bool) -> str:
    """Compare the updates of stacked layers with those of the unrolled model."""
    if case.name in LAYER_CALLS:
        case = dataclasses.replace(case, make=LAYER_CALLS[case.name])
    try:
        far = [distance(case, layers, by_layer=by_layer) for layers in LAYERS]
    except ta.TransformError as error:
        return f"{REFUSES}: {str(error).partition('. ')[0]}"
    if not max(far):
        return BITS
    if max(far) > 0.01:
        return DIFFERS
    if max(far) > ROUNDING:  # or is it rounding that the steps have enlarged?
        with jax.enable_x64(True):
            exact = distance(case, LAYERS[-1], by_layer=by_layer, dtype="float64")
        if exact > 1e-9:
            return DIFFERS
    return f"to {max(far):.0e}"


def layers_table(case_list: Sequence[Case]) -> dict[str, tuple[str, str]]:
    """Return for each transformation how it compares without and with ``per_layer``."""
    found = {}
    for index, case in enumerate(case_list):
        print(f"{index + 1:3}/{len(case_list)} {case.name}, layers", file=sys.stderr)
        found[case.name] = (
            layers_cell(case, by_layer=False),
            layers_cell(case, by_layer=True),
        )
    return found


# The page


def table(case_list: Sequence[Case], rows: Sequence[Row]) -> dict[str, dict[str, Cell]]:
    """Fill in every cell: ``{transformation: {kind of tree: cell}}``."""
    found: dict[str, dict[str, Cell]] = {}
    for index, case in enumerate(case_list):
        print(f"{index + 1:3}/{len(case_list)} {case.name}", file=sys.stderr)
        found[case.name] = {row.name: cell(case, row) for row in rows}
    return found


def pages(
    cells: Mapping[str, Mapping[str, Cell]],
    without: Mapping[str, str],
    kinds: Sequence[Row],
    case_list: Sequence[Case],
    layers: Mapping[str, tuple[str, str]],
) -> dict[str, Iterator[str]]:
    """Return the blocks of each page, by its place below ``docs``."""
    return {
        "compatibility.md": _compatibility(cells, without, kinds, case_list),
        "compatibility/layers.md": _layers(layers),
    }


def _compatibility(
    cells: Mapping[str, Mapping[str, Cell]],
    without: Mapping[str, str],
    kinds: Sequence[Row],
    case_list: Sequence[Case],
) -> Iterator[str]:
    yield "# Compatibility"
    yield (
        "Every transformation that Optax and `optax.contrib` ship, on every kind of "
        "tree of this library's tests: native Optax, and `treeadapt.adapt`. Written by "
        "`make compatibility`, which fails if a cell does; do not edit. "
        "(`dpsgd` and its aggregation get two examples, `scale_by_muon` the matrices "
        "alone.) Another page has [layers inside a scan](compatibility/layers.md)."
    )
    yield from _summary(cells, kinds)
    yield from _by_kind(cells, kinds)
    yield from _masks(kinds)
    yield from _scans(case_list)
    yield from _left_out(without)
    yield from _loops()


def _summary(
    cells: Mapping[str, Mapping[str, Cell]], kinds: Sequence[Row]
) -> Iterator[str]:
    opaque = {row.name for row in kinds if row.opaque}
    known = [
        cell
        for by_kind in cells.values()
        for kind, cell in by_kind.items()
        if kind not in opaque
    ]
    count = _counter(known)
    defined = len(known) - count["ours", UNDEFINED]
    yield f"""\
| | cells |
| --- | ---: |
| transformations x kinds of trees that JAX knows | {len(cells)} x \
{len(kinds) - len(opaque)} = {len(known):,} |
| not defined on the flat dict either | {count["ours", UNDEFINED]:,} |
| **defined** | **{defined:,}** |
| native Optax runs | {count["native", SAME]:,} |
| native Optax raises | {count["native", FAILS]:,} |
| **treeadapt equals the flat dict bit for bit** | \
**{count["ours", SAME] + count["ours", SAME_BITS]:,}** |
| treeadapt gives other numbers, or raises | \
{count["ours", OTHER] + count["ours", FAILS]:,} |"""
    yield (
        f"Python {platform.python_version()}, jax {jax.__version__}, "
        f"optax {optax.__version__}."
    )
    yield (
        "*Equals* means: the program that JAX traces for an update is, letter for "
        "letter, the program of the same transformation on the flat dict "
        "`{path: array}`, its integer and boolean state cast back, and so is the state "
        "that it starts from; so every step gives the same bits, compiled or not. "
        f"({count['ours', SAME]:,} cells; where the text differs, {STEPS} compiled "
        f"steps were run and compared: {count['ours', SAME_BITS]:,} cells.) "
        "*Native Optax runs* says that nothing was raised while two updates were "
        "traced; its numbers follow the order of the fields in a class, in which sums "
        "round and random keys are dealt out differently from the flat dict."
    )


def _counter(cells: Sequence[Cell]) -> Any:
    count = dict.fromkeys(
        [
            (side, mark)
            for side in ("native", "ours")
            for mark in (SAME, SAME_BITS, OTHER, FAILS, UNDEFINED, REFUSED)
        ],
        0,
    )
    for one in cells:
        count["native", one.native] += 1
        count["ours", one.ours] += 1
    return count


def _by_kind(
    cells: Mapping[str, Mapping[str, Cell]], kinds: Sequence[Row]
) -> Iterator[str]:
    yield "## By kind of tree"
    kinds_by_counts: dict[tuple[int, int, int], list[str]] = {}
    refused = []
    for row in kinds:
        count = _counter([by_kind[row.name] for by_kind in cells.values()])
        total = len(cells) - count["ours", UNDEFINED]
        if row.opaque:
            refused.append(
                (row.name, count["native", SAME], count["ours", REFUSED], total)
            )
            continue
        equal = count["ours", SAME] + count["ours", SAME_BITS]
        counts = (count["native", SAME], equal, total)
        kinds_by_counts.setdefault(counts, []).append(row.name)
    lines = [
        "| native runs | treeadapt equals | of | kinds |",
        "| ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| {native} | {equal} | {total} | {', '.join(names)} |"
        for (native, equal, total), names in sorted(kinds_by_counts.items())
    ]
    yield "\n".join(lines)
    yield (
        "Classes that JAX sees as one leaf cannot be differentiated, compiled or "
        "passed to Optax. `adapt` refuses them with the path and the cure; `split` "
        "gives a dict of them that trains."
    )
    lines = [
        "| kind | native runs | treeadapt refuses | of |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [f"| {name} | {runs} | {no} | {of} |" for name, runs, no, of in refused]
    yield "\n".join(lines)


def _masks(kinds: Sequence[Row]) -> Iterator[str]:
    yield "## A mask function that is not lifted"
    masks = {"as it is": ends_in_w, "`lift`ed": ta.lift(ends_in_w)}
    shown = [row for row in kinds if not row.opaque and _has_w(row)]
    lines = ["| `adamw(mask=ends_in_w)` in `adapt` | decays the right leaves | of |"]
    lines.append("| --- | ---: | ---: |")
    for name, mask in {**masks, '`ta.glob("**/w")`': ta.glob("**/w")}.items():
        right = sum(mask_cell(row, mask) == SAME for row in shown)
        lines.append(f"| {name} | {right} | {len(shown)} |")
    yield (
        "Inside `adapt` a transformation is shown the flat dict, whose only keys are "
        "whole paths. A function that looks at the last key of a leaf finds "
        "`hidden/w` there and decides otherwise; an `UnliftedMaskWarning` says so. "
        "`lift` asks it about the caller's tree; selectors and rules do so by "
        "themselves. (Where `lift` falls short, JAX's own keys end in something else: "
        "boxes add a `value`.)"
    )
    yield "\n".join(lines)


def _has_w(row: Row) -> bool:
    paths = trained(view_tree(made(row)))
    ends = any(path.rpartition("/")[2] == "w" for path in paths)
    return ends and not any(path.startswith("w/") for path in paths)


def _scans(case_list: Sequence[Case]) -> Iterator[str]:
    changing = [case for case in case_list if changes_type(case)]
    cured = [case.name for case in changing if keeps_type(case)]
    yield "## State that changes its type"
    yield (
        f"Of {len(case_list)} transformations, {len(changing)} change the type of "
        "their own state in an update of float32 params on a flat dict, so that they "
        f"do not scan. `adapt` keeps booleans and integers as they were, which cures "
        f"{len(cured)}: {_code(cured)}. "
        + _uncured([case.name for case in changing if case.name not in cured])
    )


def _uncured(names: Sequence[str]) -> str:
    return f"The others start without a part of their state: {_code(names)}." * bool(
        names
    )


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _layers(layers: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    yield "# Compatibility of layers inside a scan"
    yield (
        "Which transformations of Optax treat stacked layers as they treat the same "
        "layers apart, and which need `per_layer` for it. Written by `make "
        "compatibility`; do not edit."
    )
    alone = [name for name, (without, _) in layers.items() if is_same(without)]
    both = [name for name in alone if is_same(layers[name][1])]
    within = [n for n, pair in layers.items() if n not in alone and is_same(pair[1])]
    neither = [name for name in layers if name not in (*alone, *within)]
    yield (
        "The updates of a model whose layers are stacked along an axis of each array, "
        "compared with those of the same model unrolled: "
        f"{' and '.join(map(str, LAYERS))} layers of two kernels and a scale, next to "
        "leaves of no stack, three compiled steps on one CPU. *Without* is "
        "`adapt(tx)`, *with* is `per_layer(tx, stacks)`. *to 2e-07* is the largest "
        "difference in float32, as a part of the largest update of its leaf, where "
        "XLA orders a sum otherwise, or rounds a power of Adam's decays otherwise "
        "among those of all layers; one above 1e-6 is below 1e-9 in float64."
    )
    yield "\n".join(
        [
            "| updates are those of the unrolled model | transformations |",
            "| --- | ---: |",
            f"| without `per_layer` | {len(alone)} |",
            f"| of these, also with it | {len(both)} |",
            f"| **with `per_layer` only** | **{len(within)}** |",
            f"| neither | {len(neither)} |",
        ]
    )
    yield (
        "*No* with it is for what looks at all leaves at once, such as a global norm: "
        "inside `per_layer` that is the norm of one layer. Leave it outside. "
        f"*Neither* is what draws random numbers: {_code(neither)}. Optax splits its "
        "key for each leaf, and stacked arrays are fewer leaves. (`contrib.sophia` and "
        "its estimator draw signs, which cancel in the quadratic loss of this table; "
        "in other losses they do not. The one estimate of `contrib.prodigy` does not "
        "move in three steps: leave it outside, too.)"
    )
    yield "## By transformation"
    lines = ["| without | with | transformations |", "| --- | --- | --- |"]
    alike: dict[tuple[str, ...], list[str]] = {}
    num_others = 0
    for name, (without, inside) in layers.items():
        if without == BITS and is_same(inside):
            num_others += 1
            continue
        texts = (text.partition(":")[0] for text in (without, inside))
        alike.setdefault(tuple(texts), []).append(name)
    for texts, names in sorted(alike.items()):
        lines.append(f"| {' | '.join(texts)} | {_code(names)} |")
    yield "\n".join(lines)
    yield (
        f"The other {num_others} give the same bits without `per_layer`, and the same "
        "updates with it."
    )
    reasons: dict[str, list[str]] = {}
    for name, (_, text) in layers.items():
        if text.startswith(REFUSES):
            reasons.setdefault(text.rpartition(": ")[2], []).append(name)
    if reasons:
        yield "## What `per_layer` refuses, and why"
        yield "\n".join(f"- {_code(names)}: {why}" for why, names in reasons.items())


def is_same(text: str) -> bool:
    """Return whether a cell of the table of layers says that updates are equal."""
    return text == BITS or text.startswith("to ")


def failed_layers(layers: Mapping[str, tuple[str, str]]) -> list[str]:
    """List what equals the unrolled model in no way, and draws no random numbers."""
    return [
        f"{name}, layers: {', '.join(pair)}"
        for name, pair in layers.items()
        if not any(map(is_same, pair)) and "random numbers" not in pair[1]
    ]


def failures(cells: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    """List the cells in which treeadapt raises or gives other numbers."""
    return [
        f"{name} on {kind}: {FAILURES[one.ours]}"
        for name, by_kind in cells.items()
        for kind, one in by_kind.items()
        if one.ours in FAILURES
    ]


def _left_out(without: Mapping[str, str]) -> Iterator[str]:
    if without:
        yield "## Not in the table"
        yield "What does not run on the flat dict of a small model, and why:"
        yield "\n".join(f"- `{name}`: {reason}" for name, reason in without.items())


#: What the groups of each section of ``docs/libraries/loops``, and of Keras's page, are
#: compared with.
LOOPS = {
    "NumPyro": ("numpyro", "`SVI.run`", ""),
    "FlowJAX": ("flowjax", "`fit_to_data`", "with zeros for the frozen layer"),
    "GPJax": ("gpjax", "`fit`", ""),
    "NetKet": ("netket", "`VMC.run`, complex128", ""),
    "Dynamax": ("dynamax", "`fit_sgd`", ""),
    "sbx": ("sbx-rl", "`DQN.learn`", ""),
    "BlackJAX": ("blackjax", "`meanfield_vi`", ""),
    "Optimistix and diffrax": (
        "optimistix diffrax",
        "`minimise`, L-BFGS with a line search",
        "one optimizer for each part, written out",
    ),
    "Brax": ("brax", "`gradient_update_fn`", ""),
    "A whole `ppo.train`": ("brax", "`ppo.train`", ""),
    "Keras": ("keras", "`stateless_apply`", ""),
    "Tunix": ("google-tunix", "`PeftTrainer.train`, LoRA", ""),
}


def _loops() -> Iterator[str]:
    yield "## Loops of other libraries"
    yield (
        "Loops that [take an optimizer](libraries/loops.md), with `partition`: the "
        "trained params, compared with those of the same loop with Optax alone, and "
        "the frozen leaves, with the first params. `make test-loops` runs all of them, "
        "with these versions, and fails if a bit differs."
    )
    lines = (REPOSITORY / ".ci" / "loops.txt").read_text("utf-8").split()
    versions = dict(line.split("==") for line in lines)
    yield "\n".join(
        [
            "| library | loop | Optax alone | groups | frozen |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {', '.join(f'{name} {versions[name]}' for name in names.split())} "
                f"| {loop} | {theirs or '`optax.partition`'} | same bits | same bits |"
                for names, loop, theirs in LOOPS.values()
            ),
        ]
    )


def wrapped(block: str) -> str:
    """Wrap prose; leave tables, lists, headings and fences unchanged."""
    if block.startswith(("|", "#", "`", "-")) and not block.startswith("`make"):
        return block
    return textwrap.fill(block, 88, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write the pages; exit with 1, and a list, if treeadapt fails in any cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS, help="a folder for the pages")
    parser.add_argument("--only", help="part of the names of transformations")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("absl").setLevel(logging.ERROR)  # of lookahead
    jax.config.update("jax_platforms", "cpu")
    case_list, without = cases()
    if args.only:
        case_list = [case for case in case_list if args.only in case.name]
    rows = [row for row in TREES if row.paths]
    cells, layers = table(case_list, rows), layers_table(case_list)
    for name, blocks in pages(cells, without, rows, case_list, layers).items():
        file = args.out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n\n".join(map(wrapped, blocks)) + "\n", "utf-8")
    if failed := [*failures(cells), *failed_layers(layers)]:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
