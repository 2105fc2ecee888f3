"""Optimizers from a file: rules say which leaves, tables what trains them.

Takes a file, or a mapping that says the same; gives one transformation for any tree.
The file is data: nothing in it is imported, evaluated or looked up but in the
dictionary of ``factories``. All that is wrong is in one error.
See ``building`` for one table, ``checks`` for what only a tree can show.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optax

from treeadapt.errors import RulesFileError, TreeAdaptError
from treeadapt.optimizers.building import (
    EACH,
    MAX_DEPTH,
    Builder,
    Fault,
    Rate,
    Selection,
    TooMuchError,
)
from treeadapt.optimizers.factories import REFUSED, Factory
from treeadapt.optimizers.shared import shared_faults, with_shared
from treeadapt.selection.decision import MISSING
from treeadapt.selection.files import RULES_FILE
from treeadapt.selection.rules import Rules, rules_of
from treeadapt.text.data_files import VERSION, one_line
from treeadapt.text.names import Speller, listing, plural
from treeadapt.text.places import Place
from treeadapt.transforms.adapt import adapt
from treeadapt.transforms.hyperparams import signature_of
from treeadapt.transforms.partition import FROZEN, freeze, one_group, partition

_RESERVED = ("names", "allow_regex")  # arguments of ``load_optimizer`` itself
# What people call the label of leaves that do not train.
_LIKE_FROZEN = (FROZEN, "freeze", "fixed", "none", "no_train", "non_trainable", "stop")
_MAX_NODES = 200_000  # of a mapping


@dataclasses.dataclass(frozen=True)
class OptimizerFile:
    """What a file says of an optimizer.

    Attributes:
        rules: its rules; None if it has none, or they are malformed.
        tx: the optimizer; None if something is wrong, or lacking.
        findings: what is wrong, and where.
        lacking: names that nobody gives, and where the first use of each is.
        tables: by label, what trains it, as data, with its part of ``[each]``; under
            "" what is around all.
        selections: masks and tables of patterns.
        rates: those of its optimizers.
    """

    rules: Rules | None
    tx: optax.GradientTransformationExtraArgs | None
    findings: tuple[Fault, ...]
    lacking: Mapping[str, Place]
    tables: Mapping[str, Any]
    selections: tuple[Selection, ...]
    rates: tuple[Rate, ...]


def load_optimizer(
    path_or_mapping: str | os.PathLike[str] | Mapping[str, Any],
    /,
    *,
    names: Mapping[str, Callable[..., Any]] | None = None,
    allow_regex: bool = False,
    **given: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Return the optimizer that a rules file describes, for any tree.

    In addition to ``[rules]``, the file has a table for each label that is not
    ``"frozen"``: ``type``, a name of Optax, and its arguments by name. A list of tables
    is a chain. ``[each]`` has arguments for all of these that lack them.
    ``[optimizer]`` says what is around them, where ``{ type = "partition" }`` means the
    tables. ``{ given = "rate" }`` is a value with a name, of the table ``[given]`` or
    passed here. A mask is a pattern, or a list of patterns.

    Args:
        path_or_mapping: name of a TOML or JSON file; or the mapping that is in it, as
            YAML, OmegaConf or ml_collections have it, where ``rules`` may be pairs. It
            is data: nothing in it is imported or run.
        names: factories by name, in addition to Optax's: functions that return a
            transformation or a schedule.
        allow_regex: accept ``re:`` patterns, in a file that you trust.
        **given: values by name, in place of those in ``[given]``.

    Returns:
        ``GradientTransformationExtraArgs`` for any tree: ``partition`` of the tables
        by the rules, with its state; or with ``[optimizer]`` that expression, run on
        the flat dict of the leaves that are not frozen.

    Raises:
        RulesFileError: the file cannot be read, or anything in it is wrong; the text
            has all of it, each with its place. Or a name is not given, or unknown.

    Example:
        >>> tx = load_optimizer(
        ...     {
        ...         "rules": {"encoder": "frozen", "**": "train"},
        ...         "optimizers": {
        ...             "train": {"type": "sgd", "learning_rate": {"given": "rate"}}
        ...         },
        ...     },
        ...     rate=0.1,
        ... )
        >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> updates["head"]
        Array([-0.1, -0.1], dtype=float32)
    """
    file = read_optimizer_file(
        path_or_mapping, names=names, allow_regex=allow_regex, given=given
    )
    faults = [*file.findings]
    if not file.tables and not faults:
        cure = (
            'write [optimizers.train] with type = "adamw", for the label train; for '
            "labels alone, read it with ta.load_rules"
        )
        if file.rules is not None and {*file.rules.values} == {FROZEN}:
            cure = 'and every rule says "frozen", so nothing would train'
        faults.append(Fault(("optimizers",), f"there are none; {cure}"))
    for name, place in file.lacking.items():
        text = f"nobody gives {name!r}; pass {name}=, or write it in [given]"
        faults.append(Fault(place, text))
    if file.tx is None or faults:
        findings = [*map(str, faults)]
        head = RULES_FILE.head(_name_of(path_or_mapping))
        head += f"{plural(len(findings), 'finding')}."
        raise RulesFileError("\n  ".join([head, *findings]), findings=findings)
    return file.tx


def read_optimizer_file(
    path_or_mapping: Any,
    *,
    names: Mapping[str, Callable[..., Any]] | None = None,
    allow_regex: bool = False,
    given: Mapping[str, Any],
) -> OptimizerFile:
    """Read a file and build its optimizer; arguments as for ``load_optimizer``.

    Raises:
        RulesFileError: it cannot be read at all.
    """
    name = _name_of(path_or_mapping)
    if isinstance(path_or_mapping, str | os.PathLike):
        document = RULES_FILE.read(path_or_mapping)
    else:
        document = _plain_document(name, path_or_mapping)
    passed = {key: _plain(name, value) for key, value in given.items()}
    faults: list[Fault] = []
    table, has_rules = None, "rules" in document or "optimizer" not in document
    try:
        whole = document if has_rules else {**document, "rules": {"**": ""}}
        table = rules_of("", whole, allow_regex=allow_regex)
    except TreeAdaptError as error:
        faults.append(Fault((), str(error)))
    rules = table if has_rules else None
    in_file, each = (
        fields if isinstance(fields, dict) else {}
        for fields in (document.get("given"), document.get(EACH))
    )
    options = {} if table is None else {"stacks": table.stacks, "unused": table.unused}
    builder = Builder(in_file | passed, options, each=each, allow_regex=allow_regex)
    for fault in (*faults, *_unused(document, in_file, passed)):
        builder.find(*fault)
    _add_factories(builder, names or {})
    try:
        tx, tables = _built(builder, document, rules, each)
    except TooMuchError as error:
        builder.find(*error.fault)
        tx, tables = None, {}
    return OptimizerFile(
        rules,
        tx if builder.is_whole else None,
        tuple(builder.findings),
        builder.lacking,
        tables,
        tuple(builder.selections),
        tuple(builder.rates),
    )


def _built(
    builder: Builder, document: Mapping[str, Any], rules: Any, each: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer of a document, and its tables; notes what is wrong.

    Args:
        builder: of its tables.
        document: what the file holds.
        rules: its ``Rules``; None if it has none.
        each: arguments that the tables of labels share.
    """
    by_label, root = document.get("optimizers", {}), document.get("optimizer")
    if not isinstance(by_label, dict) or isinstance(by_label.get("type"), str):
        text = "it holds a table for each label; did you mean [optimizer]?"
        builder.find(("optimizers",), text)
        return None, {}
    for fault in shared_faults(by_label, each, builder.factories):
        builder.find(*fault)
    tables = {
        label: with_shared(table, each, builder.factories)
        for label, table in by_label.items()
    } | ({} if root is None else {"": root})
    transforms = {
        label: builder.build(table, ("optimizers", label), label)
        for label, table in by_label.items()
    }
    labels: dict[Any, Place] = {}  # where each is first
    if rules is not None:
        for pattern, label in zip(document["rules"], rules.values, strict=True):
            labels.setdefault(label, ("rules", pattern))
        if rules.default is not MISSING:
            labels.setdefault(rules.default, ("default",))
    for fault in _misfits(labels, transforms) if by_label and labels else ():
        builder.find(*fault)

    if by_label and labels:
        builder.partition = functools.partial(partition, transforms, rules)
    if root is None:
        make = builder.partition if builder.is_whole else None
        return make and make(), tables
    tx = builder.build(root, ("optimizer",))
    others = [label for label in labels if label != FROZEN and isinstance(label, str)]
    if by_label and not builder.num_partitions:
        cure = 'put { type = "partition" } where the tables of [optimizers] are to run'
        builder.find(("optimizer",), cure)
    elif not by_label and len(others) > 1:
        text = f"the labels {listing(others)} are trained alike"
        builder.find(
            ("optimizer",), f"{text}; write [optimizers] for them, or one label"
        )
    if not builder.is_whole:
        return None, tables
    if FROZEN not in labels or rules is None:
        return adapt(tx), tables
    if not by_label and others:
        return one_group(tx, rules, others[0]), tables
    return freeze(tx, rules.where(FROZEN)), tables


def _misfits(
    labels: Mapping[Any, Place], transforms: Mapping[str, Any]
) -> Iterator[Fault]:
    """Yield labels without an optimizer, and optimizers without a label."""
    names = [label for label in labels if isinstance(label, str)]
    if FROZEN in transforms:
        text = '"frozen" leaves do not train; remove this table'
        yield Fault(("optimizers", FROZEN), text)
    for label, place in labels.items():
        if label == FROZEN or label in transforms:
            continue
        key = RULES_FILE.key(label) if isinstance(label, str) else ""
        if not isinstance(label, str):
            text = f"the label {label!r} is not a text, as optimizers need"
            yield Fault(place, text)
            continue
        near = Speller().best(label, [*transforms, *_LIKE_FROZEN])
        cure = f"did you mean {near!r}?" if near else f"write [optimizers.{key}]"
        if near in _LIKE_FROZEN:
            cure = f'write "frozen" if they are not to train, or [optimizers.{key}]'
        yield Fault(place, f"the label {label!r} has no optimizer; {cure}")
    for label in transforms:
        if label not in (*names, FROZEN):
            near = Speller().best(label, names)
            cure = f"did you mean {near!r}?" if near else "add a rule, or remove it"
            if {*names} == {FROZEN}:
                cure = 'all of them say "frozen", so nothing trains'
            yield Fault(("optimizers", label), f"no rule gives this label; {cure}")


def _unused(
    document: Mapping[str, Any], in_file: Mapping[str, Any], passed: Mapping[str, Any]
) -> Iterator[Fault]:
    """Yield names of values that are reserved, or that nothing mentions."""
    mentioned = dict.fromkeys(_mentions([document, list(passed.values())]))
    for name in {**in_file, **passed}:
        if name in _RESERVED:
            text = "load_optimizer has such an argument; rename it"
            yield Fault(("given", name), text)
        elif name not in mentioned:
            near = Speller().best(name, mentioned)
            cure = f"did you mean {near!r}?" if near else "remove it"
            yield Fault(("given", name), f"the file never mentions it; {cure}")


def _mentions(data: Any) -> Iterator[str]:
    is_named = isinstance(data, dict) and data.keys() == {"given"}
    if is_named and isinstance(data["given"], str):
        yield data["given"]
    if isinstance(data, dict | list):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _mentions(each)


def _add_factories(builder: Builder, names: Any) -> None:
    """Give a builder the caller's factories; notes what is wrong with them."""
    if not isinstance(names, Mapping):
        builder.find(("names",), "it is not a mapping of factories by name")
        return
    for name, function in names.items():
        if name in builder.factories or name in REFUSED:
            builder.find(("names",), f"{name!r} is a name of Optax's; choose another")
            continue
        try:
            signature_of(function)
        except (TypeError, ValueError) as error:
            builder.find(("names",), f"{name!r} cannot be called by name: {error}")
        else:
            builder.factories[name] = Factory(name, function)


def expression_text(data: Any) -> str:
    """Write an expression as the file has it, on one line.

    Example:
        >>> table = {"type": "adamw", "learning_rate": {"given": "rate"}, "b1": 0.5}
        >>> expression_text([table, {"type": "identity"}])
        'chain(adamw(learning_rate=rate, b1=0.5), identity())'
    """
    if isinstance(data, list):
        parts = ", ".join(map(expression_text, data))
        is_chain = bool(data) and all(isinstance(each, dict) for each in data)
        return f"chain({parts})" if is_chain else f"[{parts}]"
    if not isinstance(data, dict):
        return repr(data)
    if data.keys() == {"given"}:
        return str(data["given"])
    texts = {key: expression_text(x) for key, x in data.items() if key != "type"}
    if "type" in data:
        return f"{data['type']}({', '.join(f'{k}={x}' for k, x in texts.items())})"
    return f"{{{', '.join(f'{k!r}: {x}' for k, x in texts.items())}}}"


def _name_of(path_or_mapping: Any) -> str:
    is_path = isinstance(path_or_mapping, str | os.PathLike)
    return str(path_or_mapping) if is_path else "<mapping>"


def _plain_document(name: str, mapping: Any) -> dict[str, Any]:
    """Return a mapping as a file would give it."""
    document = _plain(name, mapping)
    if not isinstance(document, dict):
        cure = "Pass the name of a file, or the mapping that is in it."
        RULES_FILE.refuse(name, f"it is of type {type(mapping).__name__}", cure)
    document = RULES_FILE.versioned(name, {"version": VERSION, **document})
    rules = document.get("rules")
    if isinstance(rules, dict) and not isinstance(mapping["rules"], Mapping):
        cure = 'Write pairs: rules = [("**/bias", "no_decay"), ("**", "decay")].'
        seen = f"rules in a {type(mapping['rules']).__name__} lose their order"
        RULES_FILE.refuse(name, seen, cure)
    if isinstance(rules, list):
        are_pairs = all(isinstance(each, list) and len(each) == 2 for each in rules)
        if not are_pairs or len({str(pattern) for pattern, _ in rules}) < len(rules):
            cure = 'Write {"**/bias": "no_decay"}, or pairs, each pattern once.'
            RULES_FILE.refuse(name, "its rules are not a table, nor pairs", cure)
        document["rules"] = dict(rules)
    return document


def _plain(name: str, data: Any) -> Any:
    """Return data as dicts and lists; what is neither stays as it is."""
    left = _MAX_NODES

    def plain(data: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > MAX_DEPTH or left < 0:
            raise ValueError("it is nested too deep, or too large")
        if isinstance(data, str):
            return str(data)
        # A ConfigDict is no Mapping, but has its methods.
        if isinstance(data, Mapping) or type(data).__name__.endswith("ConfigDict"):
            return {str(key): plain(each, depth + 1) for key, each in data.items()}
        is_list = isinstance(data, Sequence) and not isinstance(data, bytes)
        if is_list and not hasattr(data, "_fields"):  # a NamedTuple
            return [plain(each, depth + 1) for each in data]
        return data

    try:
        return plain(data, 0)
    except Exception as error:  # noqa: BLE001 - of OmegaConf: a value that is missing
        RULES_FILE.refuse(name, one_line(error), "Correct it.")
