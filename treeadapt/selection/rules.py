"""Rules: one ordered table of selectors decides what every leaf gets.

Takes ``(selector, value)`` pairs and a tree; gives its ``Decision``, or the labels in
the form in which Optax takes them. Bound rules answer by path, and the leaves of one
label are a selector. See ``decision`` for what decides and what is an error, ``files``
for rules files.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeAlias

from treeadapt.errors import (
    RulesError,
    RulesFileError,
    SelectorError,
    StackError,
)
from treeadapt.layers.stacks import NO_STACKS, Stacks
from treeadapt.selection import files
from treeadapt.selection.answers import (
    IN_AN_OPTIMIZER,
    Answers,
    Split,
    no_leaf,
    require_agreement,
)
from treeadapt.selection.arguments import check_choice, check_counts
from treeadapt.selection.decision import MISSING, STATIC, Decision, Overlap, RuleTable
from treeadapt.selection.leaves import Leaves
from treeadapt.selection.repairs import entry_text
from treeadapt.selection.selectors import (
    Bound,
    GlobSelector,
    ListSelector,
    Selector,
    Unused,
    Where,
    as_selector,
    select,
)
from treeadapt.selection.tree_first import view_first
from treeadapt.selection.whole_tree import BoundQuestion, Question
from treeadapt.text.html_table import html_table
from treeadapt.text.names import plural, shorten
from treeadapt.trees.arrays import Tree, same_value
from treeadapt.trees.describing import describe_argument
from treeadapt.trees.views import TreeView, view_tree

#: What rules can be made of: a mapping, or ordered pairs.
RulesLike: TypeAlias = (
    "Rules | BoundRules | Mapping[Any, Any] | Sequence[tuple[Where, Any]]"
)
_DEFAULTS: dict[str, Any] = {
    "default": MISSING,
    "unused": "error",
    "overlap": "first",
    "stacks": NO_STACKS,
    "expect": {},
}


class Rules(RuleTable):
    """An ordered table of selectors and values; the first that matches a leaf wins.

    Called on a tree it gives the labels, in the form that Optax takes them:
    ``optax.multi_transform(transforms, Rules({...}))``. Rules are immutable and compare
    by what they hold.

    Args:
        rules: mapping from selectors to values, or ordered ``(selector, value)`` pairs.
            A selector may be a pattern, a class, or a list of these. Or other
            ``Rules``, whose options stay where none is given here.
        default: value of array leaves that no rule matches. Without one they are an
            error. Static leaves that no rule matches get ``STATIC`` in any case.
        unused: ``"error"`` (the default) or ``"ignore"`` rules that match no array
            leaf and no None, or are unreachable.
        overlap: ``"first"`` (the default) lets the first of several rules win;
            ``"error"`` refuses two rules with different values for one leaf.
        stacks: ``{"blocks": 0}`` where arrays below ``blocks`` hold layers along axis
            0: the rules then decide on layers, ``blocks/0/w`` and so on, with the
            shapes of a layer, as on the same model unrolled. The axis counts in the
            stored array, or is its name in the box of the array. A pair
            ``("blocks_{l}", 0)`` names another unrolled form; None makes an exception
            below a stack. Stacks may be nested: ``{"blocks": 0, "blocks/experts": 1}``.
            On the unrolled model itself the rules decide without the stack.
        expect: ``{"lora": 24}`` where 24 arrays should get the label ``"lora"``; with
            ``stacks`` each layer counts. Another number is an error, except on a part
            of a tree.

    Raises:
        RulesError: the table is malformed, or ``expect`` names a label that no rule
            gives.
        StackError: ``stacks`` is malformed.
        SelectorError: a key is not a selector, or an option is not one of its choices.
        PatternError: a pattern is malformed.

    Example:
        >>> rules = Rules({"encoder": "frozen", "**": "train"})
        >>> rules({"encoder": {"kernel": jnp.ones((3, 4))}, "head": jnp.ones(4)})
        {'encoder': {'kernel': 'frozen'}, 'head': 'train'}
        >>> rules = Rules({"blocks/{0..2}": "a", "**": "b"}, stacks={"blocks": 0})
        >>> rules.match({"blocks": {"w": jnp.ones((4, 2))}}).values
        ['a', 'a', 'a', 'b']
    """

    gives = "A tree of labels"
    for_users = frozenset(
        {"match", "by_path", "where", "bind", "to_toml"}
        | {"values", "default", "unused", "overlap", "stacks", "expect"}
    )

    def __init__(
        self,
        rules: Any,
        *,
        default: Any = MISSING,
        unused: Unused | None = None,
        overlap: Overlap | None = None,
        stacks: Mapping[str, Any] | Stacks | None = None,
        expect: Mapping[Any, int] | None = None,
    ):
        changed = {"unused": unused, "overlap": overlap, "stacks": stacks}
        changed |= {"expect": dict(expect) if isinstance(expect, Mapping) else expect}
        options = rules.options if isinstance(rules, Rules) else dict(_DEFAULTS)
        options |= {name: value for name, value in changed.items() if value is not None}
        options |= {} if default is MISSING else {"default": default}
        check_choice("unused", options["unused"], ("error", "ignore"))
        check_choice("overlap", options["overlap"], ("first", "error"))
        if not isinstance(options["stacks"], Stacks):
            options["stacks"] = Stacks(options["stacks"])
        pairs: list[tuple[Selector, Any]] = []
        owners: dict[str, int] = {}
        others: list[tuple[int, Selector]] = []
        for index, (spec, value) in enumerate(_pairs(rules)):
            where = as_selector(spec)
            pairs.append((where, value))
            if where.plain is not None:
                owners.setdefault(where.plain, index)
            else:
                others.append((index, where))
                # With stacks of its own it makes the whole table one of layers.
                options["stacks"] |= where.stacks
        selectors, values = zip(*pairs, strict=True) if pairs else ((), ())
        needs = frozenset().union(*(where.needs for _, where in others))
        vars(self).update(options, pairs=tuple(pairs), selectors=selectors)
        vars(self).update(values=values, owners=owners, others=others, needs=needs)
        if options["expect"] != {}:
            labels = [x for x in (*values, options["default"]) if x is not MISSING]
            check_counts(options["expect"], labels)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Rules are immutable: cannot set {name!r}.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Rules are immutable: cannot delete {name!r}.")

    def __repr__(self) -> str:
        texts = [(where.typed, repr(value)) for where, value in self.pairs]
        hashable = not any(isinstance(where, ListSelector) for where in self.selectors)
        if hashable and len(dict(texts)) == len(texts):
            table = f"{{{', '.join(f'{where}: {value}' for where, value in texts)}}}"
        else:
            table = f"[{', '.join(f'({where}, {value})' for where, value in texts)}]"
        options = [table, *(f"{k}={v!r}" for k, v in self._options().items())]
        return f"Rules({', '.join(options)})"

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        rows = [
            (number, where.typed, repr(value))
            for number, (where, value) in enumerate(self.pairs, 1)
        ]
        options = [f"{name}={value!r}" for name, value in self._options().items()]
        title = f"{plural(len(rows), 'rule')}, of which the first that matches decides"
        return html_table(title, ("rule", "where", "label"), rows, options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rules):
            return NotImplemented
        mine, theirs = ((*r.values, *r.options.values()) for r in (self, other))
        same = map(same_value, mine, theirs)  # of one length, if selectors are
        return self.selectors == other.selectors and all(same)

    def __hash__(self) -> int:
        return hash((self.pairs, self.default, self.unused, self.overlap, self.stacks))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Rules, **self.options), (self.pairs,)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that it was made with."""
        return {name: getattr(self, name) for name in _DEFAULTS}

    def __call__(self, tree: Any, leaf: Any = MISSING, /) -> Any:
        """Return the labels of a tree, as Optax calls for them.

        Args:
            tree: any tree. Where it holds ``optax.MaskedNode``, it is taken for a part
                of a larger one: a rule that could match such a place, or something
                below it, is not reported.
            leaf: refused; nnx passes it to a filter.

        Returns:
            Tree with the treedef of ``tree`` and one label per leaf.

        Raises:
            UnmatchedPathError: an array leaf matches no rule and there is no default.
            UnusedRuleError: a rule matches no array leaf, or is unreachable.
            OverlapError: two rules with different values match one leaf.
            RulesError: a label has another number of arrays than is expected.
            SelectorError: called on a number, as a schedule would be, or as an nnx
                filter.
        """
        _refuse_filter(self.values, leaf)
        return self.ask(tree)

    def of_view(self, view: TreeView) -> list[Any]:
        """Return the labels of a tree, which may be a part of one."""
        self.require_values()
        return self._decision(view, is_part=view.plan.has_gaps).check().of_arrays()

    def decide(
        self, view: TreeView, *, reports: bool, is_part: bool = False
    ) -> Answers:
        """Decide every leaf of a tree; some may have no label."""
        decision = self._decision(view, is_part=is_part or not reports)
        self.require_values()
        if reports:
            decision.check_rules()
        return decision.answers

    def match(self, tree: Any) -> Decision:
        """Decide every leaf; report nothing yet.

        Args:
            tree: tree, concrete or abstract, or its ``TreeView``.

        Raises:
            SelectorError: a flat dict is asked for classes or sibling counts.
        """
        return self._decision(tree if isinstance(tree, TreeView) else view_tree(tree))

    def _decision(self, view: TreeView, *, is_part: bool = False) -> Decision:
        return Decision(self, *self.table(view, is_part=is_part))

    def where(self, label: Any) -> Selector:
        """Return the selector of the leaves that get a label.

        Args:
            label: a value of the table, its default, or ``STATIC``. ``"frozen"`` is
                always one, which no leaf may have.

        Raises:
            RulesError: no rule gives that label.

        Example:
            >>> rules = Rules({"encoder/head": "train", "encoder": "frozen"})
            >>> rules.where("frozen").matches("encoder/head")
            False
        """
        values = (*self.values, self.default)
        if not any(same_value(label, value) for value in (*values, STATIC, "frozen")):
            labels = [value for value in values if value is not MISSING]
            texts = ", ".join(dict.fromkeys(map(repr, labels)))
            known_ones = f"labels are {texts}" if texts else "there are no rules"
            raise RulesError(
                f"No rule gives the label {describe_argument(label)}; {known_ones}."
            )
        return OfLabel(self, label)

    def bind(self, tree: Any) -> BoundRules:
        """Decide now, on the full tree, and answer by path from then on.

        Args:
            tree: the full tree, concrete or abstract.

        Returns:
            Rules that answer rightly on every smaller view of ``tree``.

        Raises:
            UnmatchedPathError, UnusedRuleError, OverlapError: as when called on a full
                tree.

        Example:
            >>> rules = Rules({"layers/{-1}": "train", "**": "frozen"})
            >>> rules.bind({"layers": [1.0, 2.0]})({"layers/1": 2.0})
            {'layers/1': 'train'}
        """
        answers = self.match(tree).check().answers
        self.require_values()
        return BoundRules(self, dataclasses.replace(answers, missing=no_leaf))

    def by_path(self, tree: Any) -> dict[str, Any]:
        """Return the value of every leaf: priors, factors, anything, by name.

        Args:
            tree: tree, concrete or abstract.

        Returns:
            ``{path: value}``, in the order of ``tree_paths``; ``STATIC`` for functions
            and other static leaves that no rule matches. Where layers of one array get
            different values, the key of some layers, as ``blocks/{0..2}/w``, in the
            place of its path.

        Raises:
            UnmatchedPathError, UnusedRuleError, OverlapError: as for ``param_labels``.

        Example:
            >>> rules = Rules({"**/bias": None, "**": (0.0, 1.0)})
            >>> rules.by_path({"net": {"bias": jnp.ones(2), "w": jnp.ones((2, 2))}})
            {'net/bias': None, 'net/w': (0.0, 1.0)}
        """
        values: dict[str, Any] = {}
        for path, value in self.match(tree).check().answers.by_path.items():
            if isinstance(value, Split):
                values |= {one.region.key: one.value for one in value.rulings}
            else:
                values[path] = value
        return values

    def to_toml(self) -> str:
        """Write the table as a rules file, for ``load_rules``.

        A rule for a list of patterns becomes a row for each.

        Raises:
            RulesFileError: a selector is more than patterns, or a list with exclusions;
                a pattern occurs twice; or a value is not a string, number, bool,
                spec or ``shard_largest``.

        Example:
            >>> print(Rules({"policy": "frozen", "**": "train"}).to_toml(), end="")
            version = 1
            <BLANKLINE>
            [rules]
            "policy" = "frozen"
            "**" = "train"
        """
        table: dict[str, Any] = {}
        for where, value in self.pairs:
            for pattern in _as_data(where):
                if pattern in table:
                    raise RulesFileError(
                        f"A rules file holds each pattern once, and {pattern!r} is in "
                        "two rules. Remove the second one: it is unreachable."
                    )
                table[pattern] = value
        if not table:
            raise RulesFileError("There are no rules to write.")
        return files.write_toml(self._options(), table)

    def _options(self) -> dict[str, Any]:
        options = self.options | {"stacks": self.stacks.data}
        usual = {**_DEFAULTS, "stacks": {}}
        return {n: v for n, v in options.items() if not same_value(v, usual[n])}


class _OfRules(Question):
    """What is asked with the patterns and the stacks of rules."""

    rules: Rules

    @property
    def stacks(self) -> Stacks:  # type: ignore[override]
        """The stacks of the rules."""
        return self.rules.stacks

    def patterns(self) -> Iterator[str]:
        """Yield the patterns of all rules."""
        yield from self.rules.patterns()


@dataclasses.dataclass(frozen=True, repr=False)
class OfLabel(_OfRules, Selector):
    """The leaves to which rules give one label."""

    rules: Rules
    label: Any

    may_be_empty = True  # the label of the default, or of rules that match nothing

    def __repr__(self) -> str:
        return f"{self.rules!r}.where({self.label!r})"

    @functools.cached_property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What the rules need; and whether a leaf without a rule is an array."""
        return self.rules.needs | ({"leaf"} if any(self._of_unmatched) else set())

    def select(self, leaves: Leaves) -> list[bool]:
        """Find the first rule that matches each row."""
        first = self.rules.first(leaves)
        some = any(self._of_unmatched)  # otherwise arrays need not be known
        return [
            self._wanted[index]
            if index >= 0
            else some and self._of_unmatched[leaves.is_array[row]]
            for row, index in enumerate(first)
        ]

    def _reasons(self, leaves: Leaves) -> list[str]:
        return list(map(self.rules.names.__getitem__, self.rules.first(leaves)))

    def checked(self) -> Iterator[str]:
        """Yield those of all rules."""
        if self.rules.unused == "error":
            yield from super().checked()

    def unused(self, leaves: Leaves) -> Iterator[str | type]:
        """Yield what matches nothing in any rule."""
        if self.rules.unused == "error":
            for where in self.rules.selectors:
                yield from where.unused(leaves)

    @functools.cached_property
    def _wanted(self) -> tuple[bool, ...]:
        return tuple(same_value(self.label, value) for value in self.rules.values)

    @functools.cached_property
    def _of_unmatched(self) -> tuple[bool, bool]:
        """Whether a static leaf without a rule is selected, and an array."""
        return self.label is STATIC, same_value(self.label, self.rules.default)


class BoundRules(_OfRules, BoundQuestion):
    """Rules that have decided on one full tree, and answer by path."""

    for_users = frozenset({"rules", "where", "bind"})
    gives = "A tree of labels"

    @property
    def rules(self) -> Rules:  # type: ignore[override]
        """What decided."""
        table: Rules = self.asked
        return table

    def __call__(self, tree: Any, leaf: Any = MISSING, /) -> Any:
        """Return the labels of a smaller view of that tree.

        Raises:
            SelectorError: an array leaf was not there, or called on a number or as an
                nnx filter.
        """
        _refuse_filter(self.rules.values, leaf)
        return self.ask(tree)

    def where(self, label: Any) -> Selector:
        """Return the selector of the leaves that got a label, bound as well.

        Raises:
            RulesError: no rule gives that label.
        """
        chosen = functools.partial(same_value, label)
        answers = [
            each.map(chosen) if isinstance(each, Split) else chosen(each)
            for each in self.answers.values
        ]
        return Bound(self.rules.where(label), Answers(self.answers.paths, answers))


def as_rules(rules: RulesLike, *, default: Any = MISSING) -> Rules:
    """Read rules, or what they can be made of.

    Args:
        rules: ``Rules``, a mapping, or pairs.
        default: replaces the default, if given.

    Raises:
        RulesError: it is something else.
    """
    if isinstance(rules, Rules) and default is MISSING:
        return rules
    return Rules(rules, default=default)


def allowing(where: Where, unused: Unused) -> Where:
    """Return a selector that reports nothing, if what matches no array is ignored.

    Raises:
        SelectorError: ``unused`` is not one of its choices.
    """
    check_choice("unused", unused, ("error", "ignore"))
    if unused == "error":
        return where
    return Rules([(where, True)], unused=unused).where(True)


def param_labels(tree: Tree, rules: RulesLike, *, default: Any = MISSING) -> Any:
    """Label every leaf of a tree with the value of the first rule that matches.

    Args:
        tree: tree of arrays or abstract arrays, any shapes; no value is read.
        rules: ``Rules``, a mapping or ordered ``(selector, label)`` pairs.
        default: label for array leaves that no rule matches.

    Returns:
        Tree with exactly the treedef of ``tree`` and one label per leaf; functions and
        other static leaves that no rule matches are labelled ``STATIC``.

    Raises:
        UnmatchedPathError: an array leaf matches no rule and no ``default`` is given.
        UnusedRuleError: a rule matches no array leaf, or is unreachable.
        OverlapError: two rules match one leaf and the rules refuse that.
        StackError: the rules have ``stacks``, and the layers of one array get different
            labels; or a stack does not fit the tree.
        PathCollisionError: two leaves have the same path.
        RulesError: a label has another number of arrays than the rules expect.
        RulesError, SelectorError, PatternError: ``rules`` are malformed.

    Example:
        >>> params = {"encoder": {"kernel": jnp.ones((3, 4))}, "head": jnp.ones(4)}
        >>> param_labels(params, {"encoder": "frozen", "**": "train"})
        {'encoder': {'kernel': 'frozen'}, 'head': 'train'}
    """
    view = view_first(tree, rules, "param_labels(tree, rules)")
    if isinstance(rules, BoundRules) and default is MISSING:
        rules.rules.require_labels()
        labels = rules.of_view(view)
        labels = require_agreement(labels, rules.gives, cure=IN_AN_OPTIMIZER)
    else:
        labels = as_rules(rules, default=default).match(view).check().labels()
    return view.rebuild(labels)


def param_mask(tree: Tree, where: Where, *, unused: Unused = "error") -> Any:
    """Return, for every leaf of a tree, whether it is selected.

    Args:
        tree: tree of arrays or abstract arrays, any shapes; no value is read.
        where: selector, pattern, class, or a list of these.
        unused: ``"error"`` or ``"ignore"`` patterns and classes that match no array.

    Returns:
        Tree with exactly the treedef of ``tree`` and one bool per leaf.

    Raises:
        UnusedRuleError: an entry of ``where`` matches no array leaf.
        PathCollisionError: two leaves have the same path.
        SelectorError, PatternError: ``where`` is not a selector.

    Example:
        >>> params = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
        >>> param_mask(params, ["**", "!**/bias"])
        {'bias': False, 'kernel': True}
    """
    call = "param_mask(tree, where)"
    view = tree if isinstance(tree, TreeView) else view_first(tree, where, call)
    return view.rebuild(select(view, where, unused=unused, cure=IN_AN_OPTIMIZER))


def load_rules(path: str | os.PathLike[str], *, allow_regex: bool = False) -> Rules:
    r"""Read rules from a TOML or JSON file.

    ``version = 1`` and a table ``rules`` of quoted patterns and labels, the first that
    matches wins. A label that is a list is a ``PartitionSpec``: ``["data", ""]`` is
    ``P("data", None)``, and ``[]`` is ``P()``; the table ``{ shard_largest = "data",
    min_size = 65536 }`` is what ``shard_largest`` gives. ``default``, ``unused`` and
    ``overlap`` as for ``Rules``; and a table ``stacks``, with ``["blocks_{l}", 0]`` for
    a pair and ``false`` for an exception; and a table ``expect``, with ``lora = 24``.

    Args:
        path: file name, ending in ``.toml`` or ``.json``. The file is read as data:
            nothing in it is imported or run.
        allow_regex: accept ``re:`` patterns, in a file that you trust.

    Raises:
        RulesFileError: the file cannot be read, is malformed, or too large.
        PatternError: a pattern is malformed.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "rules.toml"
        >>> _ = file.write_text('version = 1\n[rules]\n"policy" = "frozen"')
        >>> load_rules(file)
        Rules({'policy': 'frozen'})
    """
    document = files.RULES_FILE.read(path)
    if "optimizer" in document and not document.keys() & {"rules", "optimizers"}:
        document |= {"rules": {"**": ""}}  # one optimizer for all leaves
    return rules_of(path, document, allow_regex=allow_regex)


def rules_of(
    path: str | os.PathLike[str], document: Mapping[str, Any], *, allow_regex: bool
) -> Rules:
    """Return the rules of what a file holds.

    Args:
        path: where it comes from, for messages.
        document: its fields. Those of an optimizer are left alone.
        allow_regex: accept ``re:`` patterns.

    Raises:
        RulesFileError, PatternError: as by ``load_rules``.
    """
    files.RULES_FILE.check(path, document, files.FIELDS)
    pairs = files.parse_rules(path, document["rules"], allow_regex=allow_regex)
    options = {n: x for n, x in document.items() if n in files.OPTIONS}
    if "stacks" in options:
        options["stacks"] = files.read_stacks(options["stacks"])
    if "default" in options:
        options["default"] = files.read_label(path, options["default"], "'default'")
    try:
        return Rules(pairs, **options)
    except (RulesError, SelectorError, StackError) as error:  # of an option
        raise RulesFileError(f"{files.RULES_FILE.head(path)}{error}") from error


def _refuse_filter(values: Sequence[Any], leaf: Any) -> None:
    if leaf is not MISSING:
        label = repr(values[0]) if values else "<label>"
        raise SelectorError(
            "Rules were called with a path and a leaf, as nnx calls a filter, and a "
            "filter says yes or no. Pass the selector of one label: "
            f"rules.where({shorten(label)})."
        )


def _pairs(rules: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(rules, Rules):
        return rules.pairs
    if isinstance(rules, BoundRules):
        raise RulesError(
            "Bound rules have decided, and only answer by path. Pass the table that "
            "they come from: bound.rules."
        )
    if isinstance(rules, Mapping):
        return tuple(rules.items())
    is_list = isinstance(rules, list | tuple)
    if is_list and all(isinstance(x, list | tuple) and len(x) == 2 for x in rules):
        return tuple((where, value) for where, value in rules)
    cure = ""
    if isinstance(rules, str | os.PathLike):
        cure = " A file of rules is read by treeadapt.load_rules(path)."
    elif isinstance(rules, FunctionType):
        cure = f" If it is one of a path, make rules of it: {rules_of_function(rules)}."
    raise RulesError(
        "Rules are a mapping from patterns to values, or ordered (pattern, value) "
        f'pairs: {{"encoder": "frozen", "**": "train"}}; got a {type(rules).__name__}.'
        + cure
    )


def rules_of_function(function: Any) -> str:
    """Write how a function of a path, or of a path and a leaf, becomes rules.

    Example:
        >>> rules_of_function(lambda path: "train").partition(" for ")[0]
        'treeadapt.Rules({treeadapt.escape(path): function(path)'
    """
    takes_leaves = False
    if isinstance(function, FunctionType):
        num_defaults = len(function.__defaults__ or ())
        takes_leaves = function.__code__.co_argcount - num_defaults > 1
    call = "path, leaf" if takes_leaves else "path"
    flat = "treeadapt.split(model)[0]" + ".items()" * takes_leaves
    return (
        f"treeadapt.Rules({{treeadapt.escape(path): function({call}) for {call} in "
        f"{flat}}})"
    )


def _as_data(where: Selector) -> Sequence[str]:
    """Return the rows of a rules file that say the same."""
    if isinstance(where, GlobSelector):
        text = where.plain
        return ["\\" + text if text.startswith("!") else text]
    if isinstance(where, ListSelector) and all(
        isinstance(e, str) for e in where.entries
    ):
        texts = [str(entry) for entry in where.entries]
        if len(texts) == 1 or not any(text.startswith("!") for text in texts):
            return texts
        raise RulesFileError(
            f"A rules file holds one pattern a row, and {entry_text(where)} excludes "
            "some. Write rules for what is excluded, before a rule for the rest: the "
            "first match wins."
        )
    raise RulesFileError(
        f"A rules file holds patterns; the selector {entry_text(where)} is more than "
        "that. For a class write the pattern '**/<Name>'."
    )
