"""Stacks: layers that a model holds along an axis of its arrays, as rows of a table.

``{"blocks": 0}`` says that every array below ``blocks`` holds layers along axis 0. The
array at ``blocks/attn/kernel`` of shape [12, 64, 64] then is ``blocks/0/attn/kernel``
to ``blocks/11/attn/kernel`` of shape [64, 64]: ``unroll`` gives a view with these
paths, shapes, classes and numbers of children, on which selectors and rules decide as
on the unrolled model. ``divide`` gives layers of one array that get the same.
In a tree that is the unrolled model itself, stacks are left out.
Decides nothing and reads no array (see ``selection``, ``region``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import jax

from treeadapt.errors import PathCollisionError, StackError
from treeadapt.layers.keys import MAX_LAYERS, boxes, runs_text
from treeadapt.layers.region import Along, Region, read_key
from treeadapt.text.names import Speller, listing, paths_text
from treeadapt.text.wording import worded
from treeadapt.trees.adapters.adapter import AxisNames
from treeadapt.trees.arrays import is_array
from treeadapt.trees.axis_names import axis_names
from treeadapt.trees.describing import describe
from treeadapt.trees.views import Plan, TreeView

_CAPTURE = re.compile(r"\{[A-Za-z_]\w*\}")
_LAYER = "(?:0|[1-9][0-9]{0,6})"


_Leaf = tuple[int, str, Any]  # its index, its path, and the array


class _Stack(NamedTuple):
    """One entry: its key, its unrolled path around the number, and its axis."""

    key: str
    before: str
    after: str
    axis: int | str | None  # None: an exception


class _UnrolledPath(NamedTuple):
    """A path of the unrolled model: texts around numbers of layers, and how many."""

    texts: list[str]
    sizes: list[int]

    def with_numbers(self, numbers: Iterable[str]) -> str:
        pairs = itertools.zip_longest(self.texts, numbers, fillvalue="")
        return "".join(itertools.chain(*pairs))

    def places(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.sizes))

    def paths(self) -> list[str]:
        return [self.with_numbers(map(str, place)) for place in self.places()]


class Stacks:
    """Which nodes of a tree hold layers, and along which axis.

    Args:
        stacks: ``{key: axis}``. The key is the path of a node or leaf of the stored
            tree, without numbers of layers; ``""`` is the whole tree. The axis counts
            in the stored array, or is its name in the metadata of its box. A pair
            ``("blocks_{l}", 0)`` also names the unrolled form, which is otherwise
            ``blocks/{l}``. None says that arrays there lack the axis of the stack
            above. Of nested stacks, the outermost number is put in first.

    Raises:
        StackError: ``stacks`` is malformed.

    Example:
        >>> Stacks({"blocks": 0, "blocks/rngs": None})
        Stacks({'blocks': 0, 'blocks/rngs': None})
    """

    data: dict[str, Any]

    def __init__(self, stacks: Mapping[str, Any] | Stacks = {}):  # noqa: B006  # read only
        if isinstance(stacks, Stacks):
            stacks = stacks.data
        if not isinstance(stacks, Mapping):
            is_rules = isinstance(getattr(stacks, "stacks", None), Stacks)
            _refuse(
                "stacks= is a mapping from the path of a node to the axis along which "
                f'its arrays hold layers, such as {{"blocks": 0}}; got {stacks!r:.100}.'
                f"{' Pass its .stacks.' if is_rules else ''}"
            )
        self.data = dict(stacks)
        read = [_read(key, value) for key, value in self.data.items()]
        self._stacks = sorted(read, key=lambda stack: (len(stack.key), stack.key))
        for stack in self._stacks:
            self._check(stack)

    def _check(self, stack: _Stack) -> None:
        around = self._around(stack.key)
        above = [one for one in around if one is not stack and one.axis is not None]
        if stack.axis is None and not above:
            _refuse(
                f"{stack_text(stack.key, None)} makes an exception, and there is no "
                "stack above it. Remove it, or give the axis of its layers."
            )
        if above and stack.axis is not None:
            outer = above[-1].key
            if outer and not stack.before.startswith(f"{outer}/"):
                _refuse(
                    f"The unrolled form of {stack.key!r}, "
                    f"{stack.before + '{l}' + stack.after!r}, is not below {outer!r}, "
                    "the stack above it. Write it without numbers of that stack: "
                    f"'{outer}/...'."
                )

    def __bool__(self) -> bool:
        return bool(self._stacks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stacks) and self._stacks == other._stacks

    def __hash__(self) -> int:
        return hash(tuple(self._stacks))

    def __repr__(self) -> str:
        return f"Stacks({self.data!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Stacks, (self.data,)

    def __or__(self, other: Stacks) -> Stacks:
        for key in self.data.keys() & other.data.keys():
            if self.data[key] != other.data[key]:
                _refuse(
                    f"Two selectors disagree about the stack {key!r}: "
                    f"{self.data[key]!r} and {other.data[key]!r}. Give both the same."
                )
        return Stacks(self.data | other.data) if other else self

    def axes(self, view: TreeView, *, is_part: bool = False) -> list[tuple[Along, ...]]:
        """Return the axes along which each leaf of a tree holds layers.

        There are none in a tree that is the unrolled model.

        Args:
            view: the stored tree, or a flat dict of it or of slices of it.
            is_part: stacks may be among what is masked out of the tree.

        Returns:
            One entry a leaf: its axes, those of the outermost stack first; empty for a
            leaf below no stack and for a leaf that is not an array.

        Raises:
            StackError: an array lacks the axis, or the arrays of a stack disagree in
                their number of layers, or a stack holds no array; or the tree may as
                well be the unrolled model.
        """
        if isinstance(view.plan, _UnrolledPlan):
            return [()] * len(view.leaves)
        names = self._axis_names(view)
        left_out = self._left_out(view, names)
        along_by_leaf: list[tuple[Along, ...]] = []
        leaves_by_size: dict[Any, dict[int, list[int]]] = {}  # of each set of layers
        met: set[str] = set()
        for index, (path, leaf) in enumerate(view.items()):
            region = read_key(path)
            met.update(stack.key for stack in self._around(region.path))
            axes: list[Along] = []
            for stack in self._chain(region.path) if is_array(leaf) else ():
                if stack.key in left_out:
                    continue
                listed = path in self.data
                axis = _axis_of(stack, path, leaf, names.get(index), listed=listed)
                for other in axes:
                    if axis == other.axis:
                        _refuse(
                            f"{listing([path])} {describe(leaf)}: axis {axis} is that "
                            f"of two stacks, {stack.key!r} and {other.stack!r}. Each "
                            "has an axis of its own, counted in the stored array.",
                            paths=[path],
                        )
                size = leaf.shape[axis]
                if size == 0:
                    text = f"{listing([path])} {describe(leaf)} holds no layer."
                    _refuse(text, paths=[path])
                layers = (stack.key, (*region.numbers.items(),))
                sizes = leaves_by_size.setdefault(layers, {})
                sizes.setdefault(size, []).append(index)
                axes.append(Along(stack.key, axis, range(size)))
            along_by_leaf.append(tuple(axes))
        for (key, _), sizes in leaves_by_size.items():
            if len(sizes) > 1:
                _refuse(_uneven(key, view, sizes))
        for path in view.plan.nones:
            met.update(stack.key for stack in self._around(path))
        if not is_part and any(map(is_array, view.leaves)):
            for stack in self._stacks:
                around = self._around(stack.key) if stack.axis is None else (stack,)
                if stack.key not in met and left_out.isdisjoint(s.key for s in around):
                    _refuse(_not_met(stack, view))
        return along_by_leaf

    def _axis_names(self, view: TreeView) -> dict[int, AxisNames]:
        """Return what boxes say of axes, if a stack is along an axis with a name."""
        named = any(isinstance(stack.axis, str) for stack in self._stacks)
        return axis_names(view) if named else {}

    def _left_out(self, view: TreeView, names: Any) -> frozenset[str]:
        """Return the keys of stacks whose layers are nodes of their own in a tree.

        For ``{"blocks": 0}``, an array at ``blocks/0/w`` says so: there a layer has its
        number in the unrolled form. Which numbers there are, and what else is there,
        does not matter: shapes never choose. But the stored model may have a list in
        this place. So it is an error if all arrays below the key fit the stack; if the
        stack names its axis, boxes decide.
        """
        arrays = [(i, *one) for i, one in enumerate(view.items()) if is_array(one[1])]
        unrolled: set[str] = set()
        for stack in self._stacks:
            if stack.axis is None:
                continue
            form = self._unrolled_form(stack)
            layers = [each for each in arrays if form.fullmatch(each[1])]
            if not layers:
                continue
            below = [x for x in arrays if stack in self._chain(read_key(x[1]).path)]
            if below and isinstance(stack.axis, str):
                named = [names[index].names for index, *_ in below if index in names]
                if not named or any(stack.axis in each for each in named):
                    continue
            elif below and _fits(stack, below):
                _refuse(_two_ways(stack, below[0], layers[0]))
            unrolled.add(stack.key)
        return frozenset(unrolled)

    def _unrolled_form(self, stack: _Stack) -> re.Pattern[str]:
        """Return what matches paths in the layers of a stack, each a node of its own.

        Each of the stacks around it may be unrolled or not.
        """
        around = [one.key for one in self._chain(stack.key) if one is not stack]
        forms = []
        for count in range(len(around) + 1):
            for keys in itertools.combinations(around, count):
                numbered = self._form(stack.key, dict.fromkeys((*keys, stack.key), 0))
                forms.append(_LAYER.join(map(re.escape, numbered.texts)))
        return re.compile(f"(?:{'|'.join(forms)})(?:/.*)?", re.DOTALL)

    def unroll(self, view: TreeView, *, is_part: bool = False) -> Unrolled:
        """Return the table of the layers of a tree; arguments as for ``axes``.

        Raises:
            StackError: as for ``axes``; or there are more than a million layers.
            PathCollisionError: the path of a layer is that of another leaf, or a leaf
                has the name of some layers.
        """
        if not self:
            count = len(view.leaves)
            return Unrolled(view, view, [1] * count, [()] * count, {}, self)
        axes = self.axes(view, is_part=is_part)
        sizes = {along.stack: len(along.numbers) for each in axes for along in each}
        for path in view.plan.paths:
            region = read_key(path)
            if not sizes.keys().isdisjoint(region.numbers):
                raise PathCollisionError(
                    f"{path!r} is the name of some layers of {region.path!r}, which is "
                    "in a stack. Rename that leaf.",
                    paths=[path],
                )
        forms = [self._form(path, sizes) for path in view.plan.paths]
        counts = [math.prod(form.sizes) for form in forms]
        if sum(counts) > MAX_LAYERS:
            _refuse(
                f"The stacks {listing(sizes)} hold {sum(counts):,} layers of arrays; "
                f"at most {MAX_LAYERS:,}. Is the axis right? Sizes: {sizes}."
            )
        key = ("unrolled", self, tuple(sizes.items()))
        plan = view.plan.memo.get(key)
        if plan is None:
            plan = _UnrolledPlan(view.plan, functools.partial(self._form, sizes=sizes))
            if plan.clash is not None:
                clash, paths = plan.paths[plan.clash[0]], view.plan.paths
                same = [paths[i] for i, at in enumerate(forms) if clash in at.paths()]
                raise PathCollisionError(
                    f"Unrolled, {listing(same)} have the same path {clash!r}. Give the "
                    "stack another unrolled form: "
                    f"{stack_text('blocks', ('blocks_{l}', 0))}.",
                    paths=[clash],
                )
            plan = view.plan.remember(key, plan)
        layers = map(one_layer, view.leaves, axes)
        leaves = [one for one, n in zip(layers, counts, strict=True) for _ in range(n)]
        rows = TreeView(leaves, plan, None, view.tree)
        return Unrolled(rows, view, counts, axes, sizes, self)

    def _form(self, path: str, sizes: Mapping[str, int]) -> _UnrolledPath:
        """Return the unrolled form of a path.

        Args:
            path: of a stored leaf or node.
            sizes: the numbers of layers, by the key of the stack. A stack that is not
                there is left out.
        """
        chain = [stack for stack in self._chain(path) if stack.key in sizes]
        # The innermost number is put in first, because the stacks above it are in the
        # text before it.
        texts = [path]
        for stack in reversed(chain):
            rest = texts[0][len(stack.key) :]
            slash = "/" if rest and not rest.startswith("/") else ""
            texts[:1] = [stack.before, f"{stack.after}{slash}{rest}"]
        return _UnrolledPath(texts, [sizes[stack.key] for stack in chain])

    def _around(self, path: str) -> list[_Stack]:
        """Return the entries at or above a path, the outermost first."""
        return [
            stack
            for stack in self._stacks
            if not stack.key or path == stack.key or path.startswith(f"{stack.key}/")
        ]

    def _chain(self, path: str) -> list[_Stack]:
        """Return the stacks in which a path is, the outermost first."""
        chain: list[_Stack] = []
        for stack in self._around(path):
            if stack.axis is not None:
                chain.append(stack)
            elif chain:
                chain.pop()
        return chain


NO_STACKS = Stacks()


class Layers(NamedTuple):
    """Some layers of a stored leaf; all of it, if it holds no layers.

    Attributes:
        path: in the unrolled model, with ``{0..3}`` for the numbers of several.
        region: which they are of an array; a static leaf is all of it.
        rows: their indices in the unrolled view.
        leaf: the index of the stored leaf.
    """

    path: str
    region: Region
    rows: list[int]
    leaf: int


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """The layers of a tree, as a view of their own.

    Attributes:
        view: the layers: paths and classes as in the unrolled model, shapes and dtypes
            for leaves. It cannot be rebuilt.
        stored: the tree as it is.
        counts: how many layers each stored leaf has; one, where it has none. Layers of
            one leaf are consecutive, the number of its innermost stack running fastest.
            (Static leaves below a stack have a row for each layer.)
        axes: along which each stored leaf holds layers.
        sizes: the number of layers of each stack; of those only that the tree holds.
        stacks: which nodes hold layers.
    """

    view: TreeView
    stored: TreeView
    counts: list[int]
    axes: list[tuple[Along, ...]]
    sizes: dict[str, int]
    stacks: Stacks

    @property
    def left_out(self) -> frozenset[str]:
        """The keys of the stacks that the tree holds unrolled."""
        names = self.stacks._axis_names(self.stored)
        return self.stacks._left_out(self.stored, names)

    def divide(self, answers: Sequence[Hashable]) -> Iterator[Layers]:
        """Yield all layers, those of one leaf together that have equal answers.

        Args:
            answers: one for each layer; those with None are left out.
        """
        paths = self.stored.plan.paths
        if not self.sizes:  # a tenth of the time of what follows
            for row, path in enumerate(paths):
                if answers[row] is not None:
                    yield Layers(path, Region(path), [row], row)
            return
        start = 0
        for leaf, (path, along) in enumerate(zip(paths, self.axes, strict=True)):
            form = self.stacks._form(path, self.sizes)
            rows = dict(zip(form.places(), itertools.count(start)))
            values, start = answers[start : start + len(rows)], start + len(rows)
            for answer, boxed in boxes(values, form.sizes).items():
                for numbers in boxed if answer is not None else ():
                    name = form.with_numbers(map(runs_text, numbers))
                    region = Region(path, along)
                    region = region.at(numbers) if along else region
                    chosen = [rows[each] for each in itertools.product(*numbers)]
                    yield Layers(name, region, chosen, leaf)


class _UnrolledPlan(Plan):
    """The plan of the unrolled model, as far as names and classes go."""

    def __init__(self, stored: Plan, form: Callable[[str], _UnrolledPath]):
        self._form = form
        paths_by_leaf = [form(path).paths() for path in stored.paths]
        self.paths = tuple(itertools.chain(*paths_by_leaf))
        leaves = [leaf for leaf, paths in enumerate(paths_by_leaf) for _ in paths]
        untrained = (row for row, leaf in enumerate(leaves) if leaf in stored.untrained)
        self.untrained = frozenset(untrained)
        self.shares, self.is_plain, self.ties = False, stored.is_plain, {}
        self.memo = {}
        self.nones, self.holes = (
            tuple(one for path in places for one in form(path).paths())
            for places in (stored.nones, stored.holes)
        )
        self.has_gaps = stored.has_gaps
        self.has_layers = len(self.paths) > len(stored.paths)
        self.is_flat_dict = stored.is_flat_dict
        self.root = stored.root
        self._nodes = {}
        for path, classes in stored._nodes.items():
            # The root is not among the nodes that have paths, unless it is a stack.
            is_root = path is None and not form("").sizes
            nodes = [path] if is_root else form(path or "").paths()
            self._nodes |= dict.fromkeys(nodes, classes)

    def with_layers(self, text: str) -> str:
        """Return a stored path with ``*`` for the numbers of layers."""
        form = self._form(text)
        return form.with_numbers("*" * len(form.sizes))


def stack_text(key: str, value: Any) -> str:
    """Write a stack as Rules take it, or for the command as a file has it.

    Args:
        key: the path of a node.
        value: its axis, or what is in its place; ``...`` for any.

    Example:
        >>> stack_text("blocks", ("blocks_{l}", 0))
        "stacks={'blocks': ('blocks_{l}', 0)}"
    """
    is_any = value is ...
    in_python = f"stacks={{{key!r}: {'...' if is_any else repr(value)}}}"
    in_file = json.dumps(key, ensure_ascii=False)
    if not is_any:
        data = False if value is None else value
        in_file += f" = {json.dumps(data, ensure_ascii=False, default=repr)}"
    return worded(in_python, f"{in_file} in [stacks]")


def _read(key: Any, value: Any) -> _Stack:
    if not isinstance(key, str) or key.startswith("/") or key.endswith("/"):
        form = f"A key of {worded('stacks=', '[stacks]')} is the path of a node, such"
        form += " as 'blocks'"
        _refuse(f"{form}; got {key!r}.")
    template, axis = None, value
    if isinstance(value, tuple | list) and len(value) == 2:
        template, axis = value
        if axis is None:
            _refuse(f"{stack_text(key, value)}: a stack has an axis, not None.")
    is_axis = isinstance(axis, int | str | None) and not isinstance(axis, bool)
    if not is_axis or axis == "" or not isinstance(template, str | None):
        forms = worded('("blocks_{l}", 0), or None', '["blocks_{l}", 0], or false')
        _refuse(
            f"{stack_text(key, value)}: expected an axis, the name of one, a pair of "
            f"the unrolled form and the axis, {forms}."
        )
    if template is None:
        return _Stack(key, f"{key}/" if key else "", "", axis)
    parts = _CAPTURE.split(template)
    if len(parts) != 2 or "//" in template or template.strip("/") != template:
        _refuse(
            f"{stack_text(key, value)}: the unrolled form is a path with one "
            "number of a layer in it, such as 'blocks_{l}' or 'blocks/{l}'."
        )
    return _Stack(key, parts[0], parts[1], axis)


def _axis_of(
    stack: _Stack, path: str, leaf: Any, names: Any, *, listed: bool = False
) -> int:
    """Return the axis of a stack in an array, which may be ``listed`` by itself."""
    rank = len(leaf.shape)
    who = f"{listing([path])} {describe(leaf)}"
    verb = "change its entry to" if listed else "add"
    cure = f"If it holds no layers, {verb} {stack_text(path, None)}."
    if not isinstance(stack.axis, str):
        axis: int = stack.axis  # type: ignore[assignment]
        if not -rank <= axis < rank:
            of = f"that of the stack {stack.key!r}"
            _refuse(f"{who} has no axis {axis}, {of}. {cure}")
        return axis % rank
    if names is None:
        _refuse(
            f"{who} has no box that names its axes, and the stack {stack.key!r} is "
            f"along the axis called {stack.axis!r}. Give the number of the axis. {cure}"
        )
    places = [i for i, name in enumerate(names.names) if name == stack.axis]
    if len(places) != 1 or places[0] >= rank:
        seen = f"names its axes {names.names!r}"
        many = "several are" if len(places) > 1 else "none is"
        _refuse(
            f"The box of {who} {seen}: {many} called {stack.axis!r}, the axis of the "
            f"stack {stack.key!r}. {cure}"
        )
    return places[0]


def _not_met(stack: _Stack, view: TreeView) -> str:
    paths = [path.split("/") for path in view.plan.paths]
    nodes = {"/".join(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    # Of a pattern, or a path with the number of a layer in it.
    before = re.split(r"/?(?:[^/]*[][*?{}!]|[0-9]+(?:/|$))", stack.key)[0]
    near = [before] if before != stack.key and before in nodes else []
    near = near or Speller().nearest(stack.key, sorted(nodes), count=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"{stack_text(stack.key, ...)} matches nothing: no leaf is there or below. "
        f"{paths_text(view.plan.paths)}{hint} A key is "
        "a path as stored, without numbers of layers, and not a pattern."
    )


def _fits(stack: _Stack, leaves: Sequence[_Leaf]) -> bool:
    """Whether arrays may hold layers along the axis of a stack."""
    with contextlib.suppress(StackError):
        sizes = {x.shape[_axis_of(stack, path, x, None)] for _, path, x in leaves}
        return len(sizes) == 1
    return False


def _two_ways(stack: _Stack, stored: _Leaf, layer: _Leaf) -> str:
    template = f"{stack.key or 'all'}_{{l}}"
    return (
        f"{stack_text(stack.key, stack.axis)} can be read in two ways: arrays "
        f"such as {stored[1]!r} {describe(stored[2])} hold layers along an axis, or "
        f"{layer[1]!r} is an array of one layer, and the tree is unrolled. If they "
        "hold layers, give another unrolled form, "
        f"{stack_text(stack.key, (template, stack.axis))}; "
        "otherwise use rules without this stack."
    )


def _uneven(key: str, view: TreeView, leaves: Mapping[int, Sequence[int]]) -> str:
    most, *_, least = sorted(leaves, key=lambda size: -len(leaves[size]))
    (first, *_), (other, *_) = leaves[least], leaves[most]
    path = view.plan.paths[first]
    return (
        f"The arrays of the stack {key!r} disagree in their number of layers: "
        f"{path!r} {describe(view.leaves[first])} has {least}, and "
        f"{view.plan.paths[other]!r} {describe(view.leaves[other])} has {most}. "
        "Correct the axis; or, if "
        f"one holds no layers, make an exception: {stack_text(path, None)}."
    )


def one_layer(leaf: Any, axes: Sequence[Along]) -> Any:
    """Return a leaf as one layer of it: shape and dtype."""
    if not axes:
        return leaf
    out = {axis.axis for axis in axes}
    shape = tuple(size for place, size in enumerate(leaf.shape) if place not in out)
    try:
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    except TypeError:  # a dtype of another library
        return SimpleNamespace(shape=shape, dtype=leaf.dtype)


def _refuse(message: str, paths: Iterable[str] = ()) -> NoReturn:
    raise StackError(message, paths=paths)
