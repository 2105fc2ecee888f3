"""Copies of one array, and several spellings of one name, that either side may have.

``copy`` says that a leaf holds what another one holds, as a head that is tied to the
embedding does. A list in one path only says how files spell a name.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import optax
import pytest
from command import run

import treeadapt as ta

TABLE = [
    ("{at=model.,}embed", "embed"),
    ("head : v e", ("head : e v", {"optional": True})),
    ("head", ("embed", {"copy": "tied"})),
    ("{at=model.,}embed : v e", ("head : e v", {"copy": "tied"})),
    ("{at=model.,}h.{l}.{n=weight,gamma} : e", "h/scale : l e"),
]
EMBED = np.arange(15, dtype="f4").reshape(5, 3)


def stored(*, prefix="model.", name="weight", head=None):
    leaves = {f"{prefix}h.{n}.{name}": np.full(3, n, "f4") for n in range(2)}
    leaves[f"{prefix}embed"] = EMBED
    return leaves if head is None else leaves | {"head": head}


def model(*, head):
    shapes = {"embed": (5, 3), "h/scale": (2, 3)} | ({"head": (3, 5)} if head else {})
    return {path: jax.ShapeDtypeStruct(shape, "f4") for path, shape in shapes.items()}


FORMS = [*itertools.product(["model.", ""], ["weight", "gamma"])]
HEADS = [None, EMBED, EMBED + 1]


def table(how):
    """The table, or a chain that does the same."""
    m = ta.Migration(TABLE)
    if how == "before":
        return ta.Migration({"{rest:**}": "{rest}"}).then(m)
    if how == "after":
        return m.then(ta.Migration({"{rest:**}": "{rest}"}))
    return m


@pytest.mark.parametrize("how", ["alone", "before", "after"])
@pytest.mark.parametrize(("prefix", "name"), FORMS)
@pytest.mark.parametrize("head", HEADS, ids=["none", "tied", "own"])
@pytest.mark.parametrize("has_head", [False, True])
def test_every_form_of_a_file_fills_every_form_of_a_model_and_comes_back(
    prefix, name, head, has_head, how
):
    source, target = stored(prefix=prefix, name=name, head=head), model(head=has_head)
    m = table(how)
    if head is HEADS[2] and not has_head:
        with pytest.raises(ta.MigrationError, match="the copies are not equal"):
            m(source, target)
        return
    params = m(source, target)
    assert {*params} == {*target}
    np.testing.assert_array_equal(params["embed"], EMBED)
    if has_head:
        np.testing.assert_array_equal(params["head"].T, EMBED if head is None else head)
    assert not ta.tree_diff(m.inverse(params, source), source, values=True)
    plan = m.plan(source, target)
    assert plan.exact
    assert {*plan.noted} == {*plan.one_way}


def test_without_a_target_a_row_makes_what_is_there():
    m = ta.Migration(TABLE)
    assert "head" not in m(stored())
    assert m(stored(head=EMBED))["head"].shape == (3, 5)
    back = m.inverse(m(stored(prefix="", name="gamma")))
    assert [*back] == ["model.embed", "model.h.0.weight", "model.h.1.weight"]


def test_a_plan_says_what_is_a_copy_and_what_is_another_spelling():
    m = ta.Migration(TABLE)
    tied = m.plan(stored(prefix="", head=EMBED), model(head=False))
    assert "'{at=model.,}embed' -> 'embed': 2 to 1" in repr(tied)
    assert "'head' -> 'embed': copies alone" in repr(tied)
    assert "{at=model.,}embed, head': its sources must be equal" in repr(tied)
    assert {*tied.noted} == {"embed", "h/scale"}
    filled = m.plan(stored(), model(head=True))
    assert (
        "'head' becomes a copy of 'model.embed', and no configuration says that tied "
        "is true." in repr(filled)
    )
    assert next(filled.explanation("head")).endswith(" -> 'embed : v e', 'head : e v'")


def test_a_table_with_copies_and_spellings_goes_through_a_file(tmp_path):
    for m in (ta.Migration(TABLE), ta.Migration(TABLE).inverse):
        file = tmp_path / "table.toml"
        file.write_text(m.to_toml())
        assert ta.load_migration(file) == m
        assert m.inverse.inverse == m
    assert 'copy = "tied"' in m.to_toml()


@pytest.mark.parametrize(
    ("stated", "rows"), [({"tied": False}, 3), ({"tied": True}, 5)]
)
def test_a_configuration_says_whether_there_are_copies(tmp_path, stated, rows):
    file = tmp_path / "table.toml"
    file.write_text(ta.Migration(TABLE).to_toml())
    m = ta.load_migration(file, config=stated)
    assert len(m.rows) == rows
    assert "tied" not in m.to_toml()
    assert len(ta.load_migration(file, config={"tied": None}).rows) == 5


def test_load_reads_copies_once_and_warns_where_nothing_says_that_they_are(tmp_path):
    file, m = tmp_path / "model.safetensors", ta.Migration(TABLE)
    ta.save(file, stored())
    with pytest.warns(ta.TreeAdaptWarning, match="'head' becomes a copy of"):
        params = ta.load(file, model(head=True), migration=m)
    np.testing.assert_array_equal(params["head"].T, EMBED)
    ta.save(file, stored(head=EMBED + 1))
    with pytest.raises(
        ta.MigrationError, match=r"'head': None, a row above all others"
    ):
        ta.load(file, model(head=False), migration=m)
    rows = ta.Migration([("head", None), *TABLE])  # as the message says
    assert {*ta.load(file, model(head=False), migration=rows)} == {*model(head=False)}


def test_the_shards_of_a_copy_are_those_of_its_own_sharding(tmp_path):
    mesh = jax.make_mesh((2,), ("d",))
    target = {
        path: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=jax.NamedSharding(mesh, jax.P(*place)),
        )
        for (path, leaf), place in zip(
            model(head=True).items(), [(), ("d",), ()], strict=True
        )
    }
    m = ta.Migration(
        [*TABLE[:3], (TABLE[3][0], ("head : e v", {"copy": True})), TABLE[4]]
    )
    ta.save(tmp_path / "model.safetensors", stored())
    params = ta.load(tmp_path / "model.safetensors", target, migration=m)
    np.testing.assert_array_equal(params["head"].T, EMBED)
    assert params["embed"].sharding == target["embed"].sharding


def test_under_jit_and_on_shapes_no_copy_is_compared():
    m, target = ta.Migration(TABLE), model(head=False)
    source = stored(head=EMBED + 1)
    params = jax.jit(lambda tree: m(tree, target))(source)
    np.testing.assert_array_equal(params["embed"], EMBED)
    specs = jax.eval_shape(lambda: source)
    assert {*m(specs, target)} == {*target}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("prefix", "name"), FORMS)
@pytest.mark.parametrize("head", [None, EMBED], ids=["none", "tied"])
def test_moments_move_as_the_params_do_and_come_back(prefix, name, head):
    tx, m = optax.adam(1e-3), ta.Migration(TABLE)
    old = stored(prefix=prefix, name=name, head=head)
    state = tx.init(old)
    grads = jax.tree.map(lambda leaf: leaf + 2, old)
    saved = ta.to_flat_dict(tx.update(grads, state, old)[1])
    params = m(old, model(head=True))
    new, report = ta.carry_state(tx, params, saved, migration=m)
    assert report.fresh == ()
    moments = m(tx.update(grads, state, old)[1][0].mu, params)
    assert not ta.tree_diff(moments, new[0].mu, values=True)
    back, report = ta.carry_state(tx, old, ta.to_flat_dict(new), migration=m.inverse)
    assert not ta.tree_diff(ta.to_flat_dict(back), saved, values=True)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("prefix", ["", "t."])
def test_moments_get_the_spelling_of_the_params_from_optional_rows_too(prefix):
    target = ("h/{n}", {"optional": True})
    m = ta.Migration([("w.{n}", target), ("t.w.{n}", target)])
    tx, old = optax.adam(1e-3), {f"{prefix}w.{n}": np.ones(3, "f4") for n in range(2)}
    params = m(old)
    state = tx.update(params, tx.init(params), params)[1]
    saved = ta.to_flat_dict(state)
    back, report = ta.carry_state(tx, old, saved, migration=m.inverse)
    assert report.fresh == ()
    assert {*back[0].mu} == {*old}
    again, report = ta.carry_state(tx, params, ta.to_flat_dict(back), migration=m)
    assert not ta.tree_diff(ta.to_flat_dict(again), saved, values=True)


# --- what is not written so ---


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([("head", ("embed", {"copy": True}))], "no other row has its source or"),
        ([("a", "b"), ("c", ("d", {"copy": True}))], "no other row has its source or"),
        ([("a : x y", "b : x y"), ("c : y x", ("b : y x", {"copy": True}))], "axes"),
        ([("a", "b"), ("c", ("b", {"copy": False}))], "its copy is False"),
        ([("a", "b"), ("c", ("b", {"copy": ""}))], "its copy is ''"),
        ([("a", "b"), ("c", ("b", {"copy": True, "scale": 2.0}))], "changes it"),
        ([("a", "b"), (("c", "d"), ("b", {"copy": True}))], "more than two addresses"),
        ([("{l}.a", "{l}/b"), ("c.{n}.a : e", ("c : n e", {"copy": True}))], "both"),
        (
            [("{at=m.,}a", "b"), ("{at=x.,}c", ("b", {"copy": True}))],
            "another list of 'at'",
        ),
        ([("{n=a,a}.x", "y")], "empty or not unique"),
        ([("{n=}.x", "y")], "empty or not unique"),
        ([("x", ("{n=a,b}.x", "y"))], "which it does not capture"),
    ],
)
def test_a_row_that_says_no_copy_or_spelling_is_an_error(rows, told):
    with pytest.raises(ta.MigrationError, match=told) as caught:
        ta.Migration(rows)
    assert len(str(caught.value)) < 4_000


def test_two_spellings_in_one_file_are_an_error():
    m = ta.Migration(TABLE)
    both = stored() | {"h.0.gamma": np.zeros(3, "f4")}
    with pytest.raises(ta.MigrationError, match=r"'h\.0\.gamma'"):
        m(both)
    with pytest.raises(ta.MigrationError, match=r"two leaves get the name"):
        ta.Migration({"{n=weight,gamma}": "scale"})({"weight": EMBED, "gamma": EMBED})


def test_a_target_that_mixes_spellings_of_a_stack_is_an_error():
    m = ta.Migration(TABLE)
    params, mixed = m(stored()), stored()
    mixed["h.1.weight"] = mixed.pop("model.h.1.weight")
    with pytest.raises(ta.MigrationError) as caught:
        m.inverse(params, mixed)
    assert "'h.1.weight'" in str(caught.value)
    assert "'model.h.1.weight'" in str(caught.value)


def test_an_empty_text_of_a_list_is_a_text():
    m = ta.Migration({"{at=a.,}w.{n}": "{n}"})
    assert [*m({"a.w.x": 1, "w.y": 2})] == ["x", "y"]
    assert [*m({"a.w.x": 1})] == ["x"]
    with pytest.raises(ta.MigrationError, match="no row takes"):
        m({"b.w.x": 1})


def test_lint_and_convert_take_copies(tmp_path):
    source, target = tmp_path / "old.safetensors", tmp_path / "new.schema.toml"
    ta.save(source, stored(head=EMBED, prefix=""))
    ta.save(target, model(head=False))
    file = tmp_path / "table.toml"
    file.write_text(ta.Migration(TABLE).to_toml())
    lint = run("lint", source, target, "--migration", file)
    assert "another spelling, unless a target has this one" in lint
    new, back = tmp_path / "new.safetensors", tmp_path / "back.safetensors"
    run("convert", source, new, "--migration", file, "--target", target)
    run("convert", new, back, "--migration", file, "--reverse", "--target", source)
    assert not ta.tree_diff(ta.load(back), ta.load(source), values=True)


def test_what_stays_where_it_is_has_a_copy_there_and_back():
    rows = [
        ("embed : v e", "embed : v e"),
        ("embed : v e", ("head : e v", {"copy": True})),
    ]
    m = ta.Migration(rows)
    made = m({"embed": EMBED}, {"embed": EMBED, "head": EMBED.T})
    np.testing.assert_array_equal(made["head"], EMBED.T)
    back = m.inverse(made, {"embed": EMBED})
    assert back.keys() == {"embed"}
    np.testing.assert_array_equal(back["embed"], EMBED)
    with pytest.raises(ta.MigrationError, match=r"not equal|differ"):
        m.inverse(made | {"head": EMBED.T + 1}, {"embed": EMBED})
