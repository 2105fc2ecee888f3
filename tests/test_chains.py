"""Tables one after the other: ``a.then(b)`` is ``b`` of what ``a`` makes, everywhere.

The first table of a random chain is one of ``test_migration_properties``. Each further
one is drawn for the arrays that the one before makes, as rows whose result NumPy gives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from command import invoke
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sizes import full
from test_migration_properties import EXAMPLES, Row, migration, same, shapes, tables
from test_slices import counted

import treeadapt as ta
from treeadapt.checkpoints import migrated, reading
from treeadapt.migrations.moved_array import moved_arrays

at_length = settings(max_examples=full(EXAMPLES * 10, EXAMPLES // 4))


@dataclasses.dataclass(frozen=True)
class Further:
    """A further table: its rows, sizes, and what NumPy makes of arrays."""

    rows: list[tuple[Any, Any]]
    sizes: dict[str, int]
    apply: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

    @property
    def migration(self) -> ta.Migration:
        return ta.Migration(self.rows, sizes=self.sizes or None)


@st.composite
def furthers(draw: Any, arrays: dict[str, np.ndarray], root: str) -> Further:
    """A table for some arrays: renames, transposes, splits, copies and joins."""
    rows, sizes, steps = [], {}, []
    left = draw(st.permutations(list(arrays)))
    while left:
        path = left.pop()
        array, new = arrays[path], f"{root}{len(rows)}"
        names = [f"{root}{len(rows)}_{axis}" for axis in range(array.ndim)]
        kind = draw(
            st.sampled_from(["rename", "turn", "split", "copy", "join", "nest"])
        )
        partner = next(
            (
                p
                for p in left
                if arrays[p].shape[1:] == array.shape[1:]
                and array.ndim == arrays[p].ndim > 0
                and arrays[p].dtype == array.dtype
            ),
            None,
        )
        order = draw(st.permutations(range(array.ndim)))
        turned = " ".join(names[axis] for axis in order)
        if kind in ("join", "nest") and partner is not None:
            left.remove(partner)
            other = [f"{names[0]}x", *names[1:]]
            parts = f"[{names[0]} {other[0]}]"
            sizes[names[0]], sizes[other[0]] = array.shape[0], arrays[partner].shape[0]
            sizes |= dict(zip(names[1:2], array.shape[1:2], strict=True))
            if kind == "nest" and array.ndim > 1:
                axes = [f"({names[1]} {parts})", *names[2:]]
            else:
                axes = [*names[1:], parts]
            source = f"{path} : {' '.join(names)}", f"{partner} : {' '.join(other)}"
            rows.append((source, f"{new} : {' '.join(axes)}"))
            is_nested = kind == "nest" and array.ndim > 1
            steps.append((_joined, (path, partner), new, is_nested))
        elif kind == "split" and array.ndim and array.shape[0] > 1:
            size = array.shape[0]
            inner = draw(
                st.sampled_from([n for n in range(1, size + 1) if size % n == 0])
            )
            sizes[f"{names[0]}b"] = inner
            a, b = f"{names[0]}a", f"{names[0]}b"
            rest = " ".join(names[1:])
            rows.append((f"{path} : ({a} {b}) {rest}", f"{new} : ({b} {a}) {rest}"))
            steps.append((_split, (path,), new, inner))
        elif kind == "copy":
            pair = f"{new} : {turned}", f"{new}copy : {' '.join(names)}"
            rows.append((f"{path} : {' '.join(names)}", pair))
            steps.append((_copied, (path,), new, order))
        elif kind == "turn" and array.ndim:
            rows.append((f"{path} : {' '.join(names)}", f"{new} : {turned}"))
            steps.append((_turned, (path,), new, order))
        else:
            rows.append((path, new))
            steps.append((_turned, (path,), new, range(array.ndim)))

    def apply(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made: dict[str, np.ndarray] = {}
        for function, paths, new, how in steps:
            if all(path in arrays for path in paths):
                made |= function(new, how, *(arrays[path] for path in paths))
        return made

    return Further(rows, sizes, apply)


def _turned(new, order, array):
    return {new: array.transpose(list(order))}


def _copied(new, order, array):
    return {new: array.transpose(list(order)), f"{new}copy": array}


def _split(new, inner, array):
    parts = array.reshape(-1, inner, *array.shape[1:])
    return {new: parts.swapaxes(0, 1).reshape(array.shape)}


def _joined(new, is_nested, one, two):
    if not is_nested:
        return {new: np.concatenate([np.moveaxis(x, 0, -1) for x in (one, two)], -1)}
    both = np.concatenate([one.swapaxes(0, 1), two.swapaxes(0, 1)], 1)
    return {new: both.reshape(-1, *both.shape[2:])}


@dataclasses.dataclass(frozen=True)
class Chain:
    """Random tables, and the arrays before and after them all."""

    row: Row
    tables: list[ta.Migration]
    after: dict[str, np.ndarray]
    target: dict[str, np.ndarray]

    @property
    def migration(self) -> ta.Migration:
        first, *others = self.tables
        for other in others:
            first = first.then(other)
        return first

    @property
    def needed(self) -> dict[str, np.ndarray] | None:
        return self.target if self.row.like else None


@st.composite
def chains(draw: Any) -> Chain:
    row = draw(tables())
    every, after = [migration(row)], row.after
    target = row.after | row.like
    for root in "xy"[: draw(st.integers(1, 2))]:
        further = draw(furthers(after, root))
        every.append(further.migration)
        after, target = further.apply(after), further.apply(target)
    return Chain(row, every, after, target)


@pytest.mark.slow
@at_length
@given(chains())
def test_law_14_a_chain_is_each_table_of_what_the_one_before_makes(chain):
    m, row = chain.migration, chain.row
    same(m(row.before, chain.needed), chain.after)
    plan = m.plan(shapes(row.before), shapes(chain.target))
    assert plan.exact == (not row.cuts and not row.products)
    assert bool(plan.one_way) == bool(row.products)
    assert {path: (spec.shape, spec.dtype) for path, spec in plan.result.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in chain.after.items()
    }
    if not row.products:
        assert m.inverse.tables == tuple(
            each.inverse for each in reversed(chain.tables)
        )
        same(m.inverse(chain.after, row.needed_back), row.before)
        assert m.inverse.inverse == m


@pytest.mark.slow
@at_length
@given(chains())
def test_law_14_a_chain_goes_through_a_file(tmp_path_factory, chain):
    m, folder = chain.migration, tmp_path_factory.mktemp("chain")
    for each in (m,) if chain.row.products else (m, m.inverse):
        (folder / "m.toml").write_text(each.to_toml(), "utf-8")
        again = ta.load_migration(folder / "m.toml")
        assert again == each
        assert hash(again) == hash(each)
    ta.save(folder / "x.safetensors", chain.row.before)
    target = chain.needed
    found = ta.load(folder / "x.safetensors", target, migration=m)
    same(found if target else ta.to_flat_dict(found), chain.after)


@pytest.mark.slow
@settings(max_examples=full(EXAMPLES * 10, EXAMPLES // 8))  # each is compiled
@given(chains())
def test_a_traced_chain_makes_the_same_arrays(chain):
    same(jax.jit(chain.migration)(chain.row.before, chain.needed), chain.after)


@pytest.mark.slow
@settings(max_examples=full(EXAMPLES * 10, EXAMPLES // 8))
@given(chains())
def test_law_14_a_state_is_carried_by_each_table(chain):
    row = chain.row
    if (
        row.products
        or row.like
        or not all(a.dtype == np.float32 for a in row.before.values())
    ):
        return
    tx = optax.trace(0.9)
    saved = optax.TraceState(dict(row.before))
    state, _ = ta.carry_state(tx, chain.after, saved, migration=chain.migration)
    steps, params = saved, row.before
    for table in chain.tables:
        params = table(params)
        steps, _ = ta.carry_state(tx, params, steps, migration=table)
    assert not ta.tree_diff(state, steps, values=True)


MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
@at_length
@given(chains(), st.data())
def test_boxes_go_through_all_tables(tmp_path_factory, chain, data):
    """Each device gets what it has of the whole result, whatever is read for it."""
    row = chain.row
    likes = dict(chain.target)
    for path, leaf in chain.after.items():
        axes = [n for n, size in enumerate(leaf.shape) if size and size % 2 == 0]
        axis = data.draw(st.sampled_from([None, *axes]))
        spec = P(*[None] * (axis or 0), "model") if axis is not None else P()
        sharding = NamedSharding(MESH, spec)
        likes[path] = jax.device_put(likes[path], sharding)
    assert {*chain.migration.plan(row.before, likes).gathered} <= likes.keys()
    file = tmp_path_factory.mktemp("boxes") / "x.safetensors"
    ta.save(file, row.before)
    found = ta.load(file, likes, migration=chain.migration)
    for path in chain.after:
        assert found[path].sharding == likes[path].sharding
    same(found, chain.after)


# What was seen to go wrong.


def array(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def equal(found, wanted):
    assert not ta.tree_diff(found, wanted, values=True)


SPLIT = ta.Migration({"h.{(b i)}.w : e": "{i}/w : b e"}, sizes={"i": 3})
JOIN = ta.Migration({"{j=0,1}/w : b e": "local : b j e", "2/w": "full"})
LAYERS = {f"h.{n}.w": array(8) + n for n in range(6)}


def test_a_quarter_of_a_chain_reads_a_quarter(tmp_path, monkeypatch):
    a = ta.Migration({"h.{n}.w : i o": "{n}/k : o i"})
    b = ta.Migration({"{n}/k : o i": "w : n i o"})
    leaves = {f"h.{n}.w": array(64, 512) for n in range(4)}
    ta.save(tmp_path / "x.safetensors", leaves)
    devices = np.array(jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices, ("one",))
    whole = jax.ShapeDtypeStruct(
        (4, 64, 512), np.float32, sharding=NamedSharding(mesh, P())
    )
    with counted(monkeypatch) as counts:
        ta.load(tmp_path / "x.safetensors", {"w": whole}, migration=a.then(b))
    assert sum(counts) == sum(leaf.nbytes for leaf in leaves.values())
    like = jax.ShapeDtypeStruct(
        (4, 64, 512), np.float32, sharding=NamedSharding(MESH, P(None, "data"))
    )
    plan = a.then(b).plan(leaves, {"w": like})
    assert not plan.gathered
    group = plan.tables[1].groups[0]
    arrays = dict(plan.source)
    for table in plan.tables:
        for group in table.groups:
            arrays |= moved_arrays(group, arrays, {})
    quarter = arrays["w"].cost([(slice(0, 4), slice(16, 32), slice(0, 512))])
    assert quarter == (4 * 64 * 512 * 4 // 4, True)


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "orbax"])
def test_each_array_is_read_once(tmp_path, monkeypatch, name):
    parts = ta.Migration(
        {"qkv : [a b] e": ("q : a e", "k : b e"), "g": "g"}, sizes={"a": 2}
    )
    renamed = ta.Migration({"q": "x/q", "k": "x/k", "g": None})
    turned = ta.Migration({"x/{p} : a e": "{p} : e a"})
    leaves = {"qkv": array(6, 3), "g": array(3)}
    if name.endswith("npz"):
        np.savez(tmp_path / name, **leaves)
    else:
        ta.save(tmp_path / name, leaves)
    seen = []
    read = migrated.read_arrays

    def noted(stored, wanted):
        seen.extend(wanted)
        return read(stored, wanted)

    monkeypatch.setattr(migrated, "read_arrays", noted)
    monkeypatch.setattr(reading, "_BATCH_BYTES", 1)
    found = ta.load(tmp_path / name, migration=parts.then(renamed).then(turned))
    equal(found, {"q": leaves["qkv"][:2].T, "k": leaves["qkv"][2:].T})
    assert seen == ["qkv"]


def test_a_partial_target_between_does_not_hide_sizes_that_differ():
    """The target shows k of the leaves between and not q, so q must not pass."""
    a = ta.Migration({"{p=q,k} : (h d) e": "{p} : e h d"}, sizes={"h": 2})
    b = ta.Migration({"q": ("q", np.negative), "k": "k"})
    leaves = {"q": array(16, 3), "k": array(8, 3)}
    target = {"q": np.zeros((3, 2, 8)), "k": np.zeros((3, 2, 4), np.float32)}
    for like in (None, target):
        with pytest.raises(ta.MigrationError, match=r"d is .*Only h.*table 1 of 2"):
            a.then(b)(leaves, like)


def test_what_the_target_does_not_show_between_is_not_missing():
    a = ta.Migration({"x.{n} : e": "x : n e", "y : e": "y : e"})
    b = ta.Migration({"x": ("z", np.negative), "y : e": ("w : e", {"scale": 2.0})})
    leaves = {"x.0": array(3), "x.1": array(3), "y": array(2)}
    target = {"z": np.zeros((2, 3), np.float32), "w": np.zeros(2, np.float32)}
    equal(a.then(b)(leaves, target), b(a(leaves)))
    equal(a.then(b)(leaves), b(a(leaves)))


@pytest.mark.parametrize("last", ["axes", "function"])
def test_spare_rows_drop_only_what_the_target_has_no_place_for(last):
    """The inverse of ``new`` for a pattern, in front of a row with no way back."""
    grown = ta.Migration({"{p:**}": "{p}"}, new={"**": "zeros"})
    back = grown.inverse  # drops all that the target lacks
    value = ("w : o i", {"scale": 2.0}) if last == "axes" else ("w", np.transpose)
    first = "a/w : i o" if last == "axes" else "a/w"
    rest = ta.Migration({first: value, "extra/kept": "kept", "{p:**}": "{p}"})
    leaves = {"a/w": array(2, 3), "b": array(2)}
    leaves |= {"extra/kept": array(4), "extra/gone": array(5)}
    want = {"w": leaves["a/w"].T * (2 if last == "axes" else 1), "b": leaves["b"]}
    want["kept"] = leaves["extra/kept"]
    equal(back.then(rest)(leaves, want), want)


def test_what_an_earlier_table_keeps_of_the_target_is_led_back(tmp_path):
    a = ta.Migration({"w : e": "w : e"}, new={"head": "target"})
    b = ta.Migration(
        {"w : e": "out/w : e", "head : v e": ("out/head : e v", {"scale": 0.5})}
    )
    leaves = {"w": array(3)}
    target = {"out/w": np.zeros(3, np.float32), "out/head": array(3, 4)}
    want = {"out/w": leaves["w"], "out/head": target["out/head"]}
    equal(a.then(b)(leaves, target), want)
    ta.save(tmp_path / "x.safetensors", leaves)
    equal(ta.load(tmp_path / "x.safetensors", target, migration=a.then(b)), want)
    shapes_alone = {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in target.items()
    }
    with pytest.raises(ta.MigrationError, match="'out/head'"):
        ta.load(tmp_path / "x.safetensors", shapes_alone, migration=a.then(b))


def test_an_inverse_lends_what_either_table_dropped():
    a = ta.Migration({"junk.*": None, "h.{n}.w : e": "{n} : e"})
    b = ta.Migration({"1": None, "{n} : e": "w/{n} : e"})
    old = {"junk.x": array(2), "h.0.w": array(3), "h.1.w": array(3) + 5}
    new = a.then(b)(old)
    assert list(new) == ["w/0"]
    equal(a.then(b).inverse(new, old), old)
    equal(a.then(b).inverse(new), {"h.0.w": old["h.0.w"]})


@pytest.mark.parametrize("name", ["local", "it's", "a, 'b'"])
def test_a_fault_of_a_later_table_names_what_its_leaf_is_made_of(name):
    m = ta.Migration({"h.w": name}).then(ta.Migration({f"{name} : (a b)": "x : a b"}))
    with pytest.raises(ta.MigrationError, match=r"is made of 'h\.w'"):
        m({"h.w": array(4)})


def test_messages_speak_of_what_is_stored(tmp_path):
    ta.save(tmp_path / "x.safetensors", LAYERS)
    m = SPLIT.then(JOIN)
    like = {
        "local": np.zeros((2, 2, 9), np.float32),
        "full": np.zeros((2, 8), np.float32),
    }
    with pytest.raises(ta.MigrationError) as error:
        ta.load(tmp_path / "x.safetensors", like, migration=m)
    assert "'local' is made of 'h.0.w'" in str(error.value)
    with pytest.raises(ta.MigrationError, match=r"'0/w' is made of 'h\.0\.w'"):
        ta.Migration({"h.{n}.w": "{n}/w"}).then(JOIN)(LAYERS)


def test_with_where_an_earlier_problem_counts_only_if_something_is_not_filled(tmp_path):
    leaves = LAYERS | {"stray": array(1)}
    ta.save(tmp_path / "x.safetensors", leaves)
    m, target = SPLIT.then(JOIN), JOIN(SPLIT(LAYERS))
    with pytest.raises(ta.MigrationError, match=r"'stray' \(table 1 of 2\)"):
        ta.load(tmp_path / "x.safetensors", target, migration=m)
    found = ta.load(tmp_path / "x.safetensors", target, migration=m, where="full")
    equal(found["full"], target["full"])


def test_a_few_tables_cannot_make_very_much():
    more = ta.Migration({"w : e": ("w : (r e)", {"repeat": {"r": 30}})})
    chain = more
    for _ in range(7):
        chain = chain.then(more)
    with pytest.raises(ta.MigrationError, match="may not make so much"):
        chain.plan({"w": array(4)})
    with pytest.raises(ta.MigrationError, match="may not make so much"):
        chain({"w": array(4)})


def test_then_takes_tables_and_chains_and_is_associative():
    a, b, c = SPLIT, JOIN, ta.Migration({"{x:**}": "m/{x}"})
    assert a.then(b).then(c) == a.then(b.then(c))
    assert a.then(b).then(c).tables == (a, b, c)
    assert a.tables == (a,)
    assert len({a.then(b), a.then(b), b.then(a)}) == 2
    with pytest.raises(ta.MigrationError, match="expects a Migration"):
        a.then({"w": "v"})
    broken = a.then(ta.Migration({"{x:**}": ("{x}", np.negative)}))
    with pytest.raises(ta.MigrationError, match="Table 2 of 2"):
        _ = broken.inverse
    with pytest.raises(ta.MigrationError, match="functions"):
        broken.to_toml()


def test_a_plan_of_a_chain_is_that_of_its_tables_and_of_the_whole():
    chain = ta.Migration({"w": "v", "b": None}).then(
        ta.Migration({"v : e": "u : e"}, new={"z": "zeros"})
    )
    leaves = {"w": np.ones(3), "b": np.ones(2)}
    plan = chain.plan(leaves, {"u": np.ones(3), "z": np.ones(2)})
    assert (plan.dropped, plan.new, plan.repeatable) == (("b",), {"z": "zeros"}, False)
    assert plan.result.keys() == {"u", "z"}
    for number, table in enumerate(plan.tables, 1):
        assert f"table {number} of 2\n{table!r}" in repr(plan)
    same = ta.Migration({"w : a b": "w : b a"}, sizes={"a": 3, "b": 3})
    assert same.then(same).plan({"w": np.ones((3, 3))}).repeatable


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version = 1\nrows = []\n[[tables]]\nrows = []", "'rows'"),
        ("version = 1\ntables = 3", "not a list"),
        ("version = 1\ntables = []", "no tables"),
        ("version = 1\n[[tables]]\nsizes = {}", "no rows"),
        ("version = 1\n[[tables]]\nrows = []\nfile = 'x'", "'file'"),
        ("version = 1\n" + "[[tables]]\nrows = []\n" * 17, "17 entries"),
    ],
)
def test_malformed_files_of_chains_are_refused(tmp_path, text, problem):
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(ta.MigrationError, match=problem):
        ta.load_migration(tmp_path / "m.toml")


def test_one_table_in_a_file_of_several_is_that_table(tmp_path):
    (tmp_path / "m.toml").write_text(
        'version = 1\n[[tables]]\n[[tables.rows]]\nfrom = "a"\nto = "b"'
    )
    assert ta.load_migration(tmp_path / "m.toml") == ta.Migration({"a": "b"})


def test_the_commands_take_a_chain(tmp_path):
    old, new, file = (
        tmp_path / n for n in ("o.safetensors", "n.safetensors", "m.toml")
    )
    m = SPLIT.then(JOIN)
    ta.save(old, LAYERS)
    file.write_text(m.to_toml())
    invoke("convert", old, new, "--migration", file)
    equal(ta.load(new), m(LAYERS))
    result = invoke("lint", old, new, "--migration", file)
    assert result.exit_code == 0, result.stdout
    shown = invoke("explain", old, "h.4.w", "--migration", file).stdout
    assert "table 2 of 2" in shown
    assert "'1/w'" in shown
    invoke("convert", new, tmp_path / "b.safetensors", "--migration", file, "--reverse")
    equal(ta.load(tmp_path / "b.safetensors"), LAYERS)


def test_a_chain_may_be_one_of_several_migrations(tmp_path):
    ta.save(tmp_path / "x.safetensors", LAYERS)
    target = JOIN(SPLIT(LAYERS))
    with pytest.raises(ta.MigrationError, match=r"pass first\.then\(second\)"):
        ta.load(tmp_path / "x.safetensors", target, migration=[JOIN, SPLIT])
    several = [JOIN, SPLIT.then(JOIN)]
    equal(ta.load(tmp_path / "x.safetensors", target, migration=several), target)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_moments_are_scaled_by_all_tables():
    old = {f"h.{n}.w": array(4, 3) + n for n in range(3)}
    a = ta.Migration({"h.{n}.w : o i": ("{n}/k : i o", {"scale": 2.0})})
    b = ta.Migration({"{n}/k : i o": ("w : n i o", {"scale": 4.0})})
    new = a.then(b)(old)
    tx = optax.adam(1e-3)
    _, saved = tx.update(old, tx.init(old), old)
    state, report = ta.carry_state(tx, new, saved, migration=a.then(b))
    assert not report.fresh
    assert not report.unmoved
    moved = ta.Migration({"h.{n}.w : o i": "w : n i o"})
    equal(state[0].mu, jax.tree.map(lambda x: x / 8, moved(saved[0].mu)))
    equal(state[0].nu, jax.tree.map(lambda x: x / 64, moved(saved[0].nu)))
    assert report.carried["0/mu/w"] == "0/mu/h.{0..2}.w"


def test_what_cannot_be_moved_is_named_as_it_was_saved():
    old = {"h.0.w": array(3), "h.1.w": array(3)}
    a = ta.Migration({"h.{n}.w : e": "{n} : e"})
    b = ta.Migration({"0": ("w", (np.negative, np.negative)), "1": "v"})
    tx = optax.trace(0.9)
    new = a.then(b)(old)
    _, report = ta.carry_state(tx, new, optax.TraceState(old), migration=a.then(b))
    assert report.unmoved == {"trace/h.0.w": "its row has a function"}


def test_moments_that_one_table_pads_are_turned_by_the_next():
    a = ta.Migration({"w : v": ("w : v", {"pad": {"v": (0, 1)}})})
    b = ta.Migration({"w : v": "x : v 1"})
    old = {"w": array(2) + 1}
    saved = optax.TraceState(dict(old))
    new = a.then(b)(old)
    state, report = ta.carry_state(optax.trace(0.9), new, saved, migration=a.then(b))
    assert not report.unmoved
    equal(state.trace, new)
