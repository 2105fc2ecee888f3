"""Split a tree into what trains and the rest, and merge them again.

``params`` is a plain dict of the selected arrays: the thing to differentiate, optimise,
donate and save. ``rest`` is a pytree with everything else: unselected arrays are its
leaves, so they pass through ``jit`` as arguments; functions, static fields and
containers ride in its static part. No leaf is read, moved, copied or cast.
See ``selectors`` for which leaves are selected, ``paths`` for their names.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from treeadapt.errors import (
    CollectionWarning,
    NoArraysError,
    RandomStateWarning,
    StructureMismatchError,
    TiedLeafWarning,
    TreeAdaptError,
)
from treeadapt.selection.rules import allowing
from treeadapt.selection.selectors import Unused, Where, as_selector, select
from treeadapt.selection.tree_first import view_first
from treeadapt.selection.whole_tree import Question
from treeadapt.text.names import Mismatch, listing, plural, shorten
from treeadapt.trees.arrays import Params, are_arrays, are_inexact, is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.metadata import Snapshot, node_data
from treeadapt.trees.state_dict import containers, differs
from treeadapt.trees.views import Plan, TreeView, same_structure

T = TypeVar("T")
Ties = Mapping[str, str]
_MAX_TIES = 8  # that a warning writes out


@jtu.register_pytree_with_keys_class
class Rest(Generic[T]):
    """What ``split`` leaves over: a pytree whose leaves are the unselected arrays.

    Two rests of equal trees have one treedef, so a function that takes one is traced
    once. Make one with ``split`` and use it up with ``merge``.

    Attributes:
        arrays: ``{label path: array}`` of the unselected arrays, any shapes and dtypes.
    """

    __slots__ = ("_form", "_values")

    #: Its arrays are by path: selectors of classes are to be asked of the whole tree.
    forgets_classes: ClassVar[bool] = True

    def __init__(self, values: Sequence[Any], form: _Form):
        self._values = tuple(values)
        self._form = form

    @property
    def arrays(self) -> dict[str, Any]:
        """The unselected arrays by label path."""
        paths = self._form.plan.paths
        places = (paths[index] for index in self._form.kept)
        return dict(zip(places, self._values, strict=True))

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}: {describe(v)}" for k, v in self.arrays.items())
        return f"Rest({{{shown}}})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Form]:
        """Return the arrays and the static part, for JAX."""
        return self._values, self._form

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], _Form]:
        """Return the arrays with their paths and the static part, for JAX."""
        paths = self._form.plan.paths
        keys = (jtu.DictKey(paths[index]) for index in self._form.kept)
        return tuple(zip(keys, self._values, strict=True)), self._form

    @classmethod
    def tree_unflatten(cls, form: _Form, values: Sequence[Any]) -> Rest[Any]:
        """Rebuild, for JAX."""
        return cls(values, form)


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """The static part of a rest: how params and arrays go together again.

    JAX finds compiled functions by its equality, so that is strict: static leaves and
    the metadata of nodes compare as they were when the tree was split.
    """

    plan: Plan
    structure: Any  # of the caller's tree, for the way back
    chosen: tuple[int, ...]  # leaves that are in params
    kept: tuple[int, ...]  # leaves that are arrays of the rest
    tied: tuple[tuple[int, int], ...]  # leaf, and the leaf whose value it takes
    static: tuple[int, ...]  # leaves that are neither
    statics: Snapshot  # of their values
    nested: bool
    metadata: Snapshot  # of the nodes

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Form)
            and same_structure(self.structure, other.structure)
            and self._parts() == other._parts()
        )

    def _parts(self) -> tuple[Any, ...]:
        places = (self.plan.paths, self.chosen, self.kept, self.tied)
        return (self.nested, *places, self.statics, self.metadata)

    def __hash__(self) -> int:
        return hash((len(self.plan), len(self.chosen), self.nested))


def split(
    tree: T,
    where: Where = "**",
    *,
    arrays: Literal["inexact", "all"] = "inexact",
    nested: bool = False,
    tie: Ties | None = None,
    unused: Unused = "error",
) -> tuple[Params, Rest[T]]:
    """Split a tree into a dict of selected arrays and a pytree of the rest.

    This is what Equinox calls ``partition``; ``treeadapt.partition`` is Optax's.
    Leaves outside ``params`` cost no gradient and no optimizer state, so freezing by
    ``split`` is the strongest kind: ``split(model, ~ta.glob("encoder"))``.

    Args:
        tree: any tree; the arrays may be concrete, traced, abstract or sharded.
        where: selector of the leaves that go to ``params``.
        arrays: ``"inexact"`` takes floating-point and complex arrays that train (no
            batch statistics); ``"all"`` takes every array.
        nested: give ``params`` as a nested state dict instead of a flat dict.
        tie: ``{path: source path}``: the leaf at ``path`` is left out of ``params`` and
            takes the value of the source on ``merge``.
        unused: ``"error"`` or ``"ignore"`` entries of ``where`` that match no array.

    Returns:
        ``params``, ``{label path: array}`` in leaf order, the caller's own arrays; and
        ``rest``, a pytree of the other arrays. ``merge(params, rest)`` is ``tree``.

    Raises:
        PathCollisionError: two leaves have the same path.
        UnusedRuleError: a pattern in ``where`` matches no array.
        NoArraysError: ``where`` selects arrays, none of which trains.
        TreeAdaptError: ``arrays`` is something else.
        StructureMismatchError: ``tie`` is not a mapping, or names a path that is not an
            array of ``tree``, or two arrays of different shape or dtype.

    Warns:
        TiedLeafWarning: arrays have two paths and would train apart.
        CollectionWarning: Linen collections that ``where`` does not name would train
            in addition to ``params``.
        RandomStateWarning: the rest keeps counts of random draws, as of nnx's dropout.

    Example:
        >>> params, rest = split({"w": jnp.ones(2), "name": "mlp", "n": jnp.arange(3)})
        >>> list(params), rest
        (['w'], Rest({n: int32[3]}))
        >>> merge({"w": params["w"] * 2}, rest)["w"]
        Array([2., 2.], dtype=float32)
    """
    view = view_first(tree, where, "split(tree, where)")
    tied = _ties(view, {} if tie is None else tie)
    array_column = are_arrays(view.leaves)
    where = allowing(where, unused)
    selected = _selected(view, array_column, where, arrays)
    following = dict(tied)
    chosen = tuple(selected)
    if following:
        chosen = tuple(index for index in selected if index not in following)
    form = _form(view, array_column, chosen, tied, nested=nested)
    _warn_of_ties(view, selected, following)
    if arrays == "inexact":
        _warn_of_collections(view, chosen, where)
        _warn_of_random_state(view, form)
    paths, leaves = view.plan.paths, view.leaves
    chosen_paths = map(paths.__getitem__, chosen)
    params = dict(zip(chosen_paths, map(leaves.__getitem__, chosen), strict=True))
    values = [leaves[i] for i in form.kept]
    return (_nest(form, params) if nested else params), Rest(values, form)


def merge(params: Mapping[str, Any], rest: Rest[T]) -> T:
    """Put a tree together again from what ``split`` returned.

    Args:
        params: mapping with exactly the keys that ``split`` gave; any leaves.
        rest: the rest that ``split`` gave, as it was or after ``jit``, ``grad``, ...

    Returns:
        Tree of the classes that were split, with the values of ``params`` and ``rest``.

    Raises:
        StructureMismatchError: a key of ``params`` is missing or unexpected, or a value
            is a container, such as ``None``.

    Example:
        >>> params, rest = split([jnp.ones(2), jnp.zeros(2)], "0")
        >>> merge({"0": 5.0}, rest)[0]
        5.0
    """
    if not isinstance(rest, Rest):
        raise StructureMismatchError(
            "merge takes (params, rest), both as split returned them; got a "
            f"{type(rest).__name__} as the rest."
        )
    form = rest._form
    paths = [form.plan.paths[index] for index in form.chosen]
    flat = _unnest(form, params) if form.nested else params
    if not isinstance(flat, Mapping):
        raise StructureMismatchError(
            f"params are a mapping from path to value, got {describe(params)}."
        )
    if len(flat) != len(paths) or not all(path in flat for path in paths):
        expected, hint = frozenset(paths), "Pass all params, under the same keys."
        missing = [path for path in paths if path not in flat]
        mismatch = Mismatch(missing, [str(x) for x in flat if x not in expected])
        text = mismatch.text("entry", "the dict has", to="what split gave", hint=hint)
        raise StructureMismatchError(text, paths=mismatch.paths)
    # What is traced with other values than those of the split is not found for these.
    form.statics.is_current()
    form.metadata.is_current()
    _require_leaves(paths, [flat[path] for path in paths], "merge")
    leaves: list[Any] = [None] * len(form.plan)
    for index, path in zip(form.chosen, paths, strict=True):
        leaves[index] = flat[path]
    for index, value in zip(form.kept, rest._values, strict=True):
        leaves[index] = value
    for index, value in zip(form.static, form.statics.things, strict=True):
        leaves[index] = value
    for index, source in form.tied:
        leaves[index] = leaves[source]
    tree: T = form.structure.unflatten(leaves)
    return tree


def map_where(
    fn: Callable[[Any], Any], tree: T, where: Where, *, unused: Unused = "error"
) -> T:
    """Apply a function to the selected arrays of a tree.

    Args:
        fn: called with one array, returns what takes its place.
        tree: any tree.
        where: selector; static leaves are left alone even where it matches.
        unused: ``"error"`` or ``"ignore"`` entries of ``where`` that match no array.

    Returns:
        Tree with the treedef of ``tree``.

    Raises:
        UnusedRuleError: a pattern in ``where`` matches no array.
        TreeAdaptError: ``fn`` cannot be called.
        StructureMismatchError: ``fn`` gives a container, such as ``None``.

    Example:
        >>> map_where(lambda x: x * 2, {"a": jnp.ones(1), "b": jnp.ones(1)}, "a")
        {'a': Array([2.], dtype=float32), 'b': Array([1.], dtype=float32)}
    """
    if not callable(fn) or isinstance(fn, Mapping | list | tuple | Question):
        raise TreeAdaptError(
            "map_where takes the function first, map_where(fn, tree, where); got "
            f"{describe(fn)} for it."
        )
    view = view_first(tree, where, "map_where(fn, tree, where)")
    chosen = select(view, where, unused=unused)
    leaves = [
        fn(leaf) if yes and is_array(leaf) else leaf
        for leaf, yes in zip(view.leaves, chosen, strict=True)
    ]
    _require_leaves(view.plan.paths, leaves, "map_where")
    mapped: T = view.rebuild(leaves)
    return mapped


def _require_leaves(paths: Sequence[str], leaves: Sequence[Any], name: str) -> None:
    if wrong := containers(paths, leaves):
        path, problem = next(iter(wrong.items()))
        more = f" {len(wrong) - 1:,} more are like it." if len(wrong) > 1 else ""
        raise StructureMismatchError(
            f"{name} was given a container for a leaf: {listing([path])}: {problem}, "
            f"because the tree would have another structure.{more} Give an array or "
            "another leaf.",
            paths=wrong,
        )


def _selected(
    view: TreeView, array_column: Sequence[bool], where: Where, arrays: str
) -> list[int]:
    if arrays not in ("inexact", "all"):
        raise TreeAdaptError(f'arrays= is "inexact" or "all", got {arrays!r}.')
    matches = map(operator.and_, select(view, where), array_column)
    matched = list(itertools.compress(range(len(view.leaves)), matches))
    if arrays == "all":
        return matched
    untrained = view.plan.untrained
    inexact_column = are_inexact(map(view.leaves.__getitem__, matched))
    chosen = list(itertools.compress(matched, inexact_column))
    if untrained:
        chosen = [index for index in chosen if index not in untrained]
    selector = as_selector(where)
    if matched and not chosen and selector.plain != "**":
        path = view.plan.paths[matched[0]]
        seen = describe(view.leaves[matched[0]])
        kind = "does not train" if matched[0] in untrained else "is not floating-point"
        raise NoArraysError(
            f"{shorten(repr(selector))} selects {plural(len(matched), 'array')}, and "
            f"none of them trains: {path!r}, {seen}, {kind}. Select the parameters, "
            'or pass arrays="all" for whatever is selected.'
        )
    return chosen


def _form(
    view: TreeView,
    array_column: Sequence[bool],
    chosen: tuple[int, ...],
    tied: tuple[tuple[int, int], ...],
    *,
    nested: bool,
) -> _Form:
    left: list[int] = []
    if len(chosen) + len(tied) < len(view.leaves):
        used = {*chosen, *dict(tied)}
        left = [index for index in range(len(view.leaves)) if index not in used]
    kept = tuple(index for index in left if array_column[index])
    static = tuple(index for index in left if not array_column[index])
    data = node_data(view.structure)
    metadata = view.plan.memo.get("metadata")  # the last of this structure
    if metadata is None or not metadata.is_of(data):
        metadata = view.plan.remember("metadata", Snapshot(data))
    return _Form(
        plan=view.plan,
        structure=view.structure,
        chosen=chosen,
        kept=kept,
        tied=tied,
        static=static,
        statics=Snapshot([view.leaves[index] for index in static]),
        nested=nested,
        metadata=metadata,
    )


def _ties(view: TreeView, tie: Ties) -> tuple[tuple[int, int], ...]:
    if not isinstance(tie, Mapping):
        raise StructureMismatchError(
            "tie= is a mapping from a path to the path whose value it takes, "
            f'{{"head/weight": "embed/weight"}}; got {describe(tie)}.'
        )
    flat = view.flat() if tie else {}
    for path, source in tie.items():
        one, two = flat.get(path), flat.get(source)
        if not (is_array(one) and is_array(two)):
            name = source if is_array(one) else path
            problem = f"{name!r} is not an array of this tree"
        elif path == source or source in tie:
            problem = "the source must be a leaf of its own, not one that is tied"
        elif differs(one, two):
            problem = f"{path!r} is {describe(one)} but {source!r} is {describe(two)}"
        else:
            continue
        text = f"tie={{{path!r}: {source!r}}}: {problem}."
        raise StructureMismatchError(text, paths=[path, source])
    index_of = dict(zip(flat, range(len(flat)), strict=True))
    return tuple((index_of[path], index_of[source]) for path, source in tie.items())


def _warn_of_ties(
    view: TreeView, selected: Sequence[int], following: Mapping[int, int]
) -> None:
    if len(set(map(id, view.leaves))) == len(view.leaves):
        return
    arrays = [i for i, leaf in enumerate(view.leaves) if _has_buffer(leaf)]
    trained = set(selected)
    first: dict[int, int] = {}
    apart: dict[str, str] = {}
    twice: dict[str, str] = {}
    for index in arrays:
        other = first.setdefault(id(view.leaves[index]), index)
        source = following.get(other, other)
        if source == following.get(index, index):
            continue
        pairs = twice if trained.isdisjoint({index, other}) else apart
        pairs[view.plan.paths[index]] = view.plan.paths[source]
    for pairs, harm in (
        (apart, "and would train apart"),
        (twice, "which the rest holds twice, so it cannot be donated"),
    ):
        if pairs:
            warnings.warn(_ties_text(pairs, harm), TiedLeafWarning, stacklevel=3)


def _ties_text(pairs: Mapping[str, str], harm: str) -> str:
    """Write what is wrong with arrays that have two paths, and the ties that cure it.

    Args:
        pairs: path to the other path of its array.
        harm: what is wrong with each.
    """
    path, source = next(iter(pairs.items()))
    left = len(pairs) - 1
    others = f" (and {left:,} more {'pairs' if left > 1 else 'pair'} of paths)"
    tie = [f"{one!r}: {two!r}" for one, two in pairs.items()]
    shown = ", ".join(tie[:_MAX_TIES] + ["..."] * (len(tie) > _MAX_TIES))
    return (
        f"{source!r} and {path!r}{others if left else ''} are one array, {harm}. Tie "
        f"them with split(..., tie={{{shown}}}), or copy one of them."
    )


def _has_buffer(leaf: Any) -> bool:
    # Tracers lose their identity, abstract arrays and scalars have none worth a name.
    is_traced = isinstance(leaf, jax.core.Tracer)
    return isinstance(leaf, jax.Array | np.ndarray) and not is_traced


def collections_beside_params(
    plan: Plan, paths: Iterable[str], patterns: Iterable[str]
) -> list[str]:
    """Name the other collections of Linen variables in which some leaves are.

    Args:
        plan: of the variables; of any other tree nothing is named.
        paths: of the leaves.
        patterns: a collection with which one of them begins is meant, and not named.
    """
    is_mapping = plan.root is not None and issubclass(plan.root, Mapping)
    if not is_mapping or "params" not in plan.child_names(None):
        return []
    meant = {"params", *(text.partition("/")[0] for text in patterns)}
    names = dict.fromkeys(path.partition("/")[0] for path in paths)
    return [name for name in names if name not in meant]


def _warn_of_collections(view: TreeView, chosen: Sequence[int], where: Any) -> None:
    paths = (view.plan.paths[index] for index in chosen)
    patterns = as_selector(where).patterns()
    if other := collections_beside_params(view.plan, paths, patterns):
        warn_of_collections(
            other,
            'Select the parameters alone, split(variables, "params"), or name the '
            f"others: split(variables, {['params', *other]}).",
        )


def warn_of_collections(names: Sequence[str], cure: str) -> None:
    """Warn of collections of variables that would train next to ``params``."""
    text = f"Collections other than 'params' are about to be trained: {listing(names)}"
    warnings.warn(f"{text}. {cure}", CollectionWarning, stacklevel=4)


def _warn_of_random_state(view: TreeView, form: _Form) -> None:
    """Warn of keys among what does not train; while tracing, a loss returns them."""
    paths = [
        view.plan.paths[index]
        for index in form.kept
        if index in view.plan.untrained
        and jnp.issubdtype(view.leaves[index].dtype, jax.dtypes.prng_key)
        and not isinstance(view.leaves[index], jax.core.Tracer)
    ]
    if paths and form.chosen:
        warnings.warn(
            f"The rest keeps the random state {listing(paths, limit=2)}: with one "
            "rest, each merged model draws the same numbers. Return the rest of the "
            "model that was called, ta.split(model)[1], from the loss for the next "
            "step. Ignore this warning if you do, or if nothing draws.",
            RandomStateWarning,
            stacklevel=3,
        )


def _nest(form: _Form, params: Mapping[str, Any]) -> Any:
    """Nest flat params as a state dict without the other leaves."""
    root: dict[str, Any] = {}
    for index, keys in _places(form):
        if not keys:
            return params[form.plan.paths[index]]
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = params[form.plan.paths[index]]
    return root


def _unnest(form: _Form, params: Any) -> Any:
    """Flatten nested params by the names of the tree that was split."""
    path_of = {keys: form.plan.paths[index] for index, keys in _places(form)}
    flat: dict[str, Any] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), params)]
    while pending:
        keys, node = pending.pop()
        if isinstance(node, Mapping) and keys not in path_of:
            below = [((*keys, key), child) for key, child in node.items()]
            pending += reversed(below)
        else:
            flat[path_of.get(keys, "/".join(map(str, keys)))] = node
    return flat


def _places(form: _Form) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each chosen leaf and its keys in the nested form, in that form's order."""
    chosen = frozenset(form.chosen)
    skeleton = form.plan.nest(range(len(form.plan)))
    for keys, index in jtu.tree_flatten_with_path(skeleton)[0]:
        if index in chosen:
            yield index, tuple(entry.key for entry in keys)
