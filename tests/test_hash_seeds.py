"""No answer depends on the hash seed: two processes with different ones print the same.

Each runs all programs, because to import every library takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SEEDS = ("1", "2")

RUN = """
import contextlib, io, json, sys, warnings
warnings.simplefilter("ignore")
found = {}
for name, program in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    found[name] = printed.getvalue()
json.dump(found, sys.stdout)
"""

ORDERS = "print({'b', 'a'}, frozenset('xyz'))"

LAW_9 = """
from trees import TREES
import treeadapt as ta
for row in TREES:
    print(row.name, ta.tree_paths(row.make()), list(ta.to_flat_dict(row.make())))
"""

RULES = """
import jax
from treeadapt import Rules
tree = {"t": {w: jax.ShapeDtypeStruct((1,), "f") for w in ("a", "b", "ab", "c")}}
rules = Rules([(["t/a*", "!t/ab"], "x"), ("**/b", "y"), ("**", "z")])
print(rules(tree), rules, rules.match(tree).values)
print(Rules({("t/a", "t/c"): "x", "**": "z"}).to_toml())
try:
    Rules([("tt/a", 1), ("t.b", 2), ("t/cc", 3), ("**", 4)])(tree)
except ValueError as error:
    print(error)
"""

PARTITION = """
import jax, jax.numpy as jnp, optax, treeadapt as ta
names = ["embed", "head", "norm", "attn", "mlp"]
params = {n: {"w": jnp.ones(2), "b": jnp.ones(2)} for n in names}
rules = {"embed": "frozen", **{n: n for n in names[1:]}}
tx = ta.partition({n: optax.adam(0.1) for n in names[1:]}, rules)
state = tx.init(params)
update = lambda g, s, p: tx.update(g, s, p, tags=p)
print(jax.make_jaxpr(update)(params, state, params), jax.tree.structure(state))
"""

PICTURES = """
import jax, treeadapt as ta
array = lambda n: jax.ShapeDtypeStruct((n,), "f4")
tree = {c: [{d: array(3) for d in "wxyz"}] * 4 for c in "abcdef"}
s = ta.summarize(tree, {"**/{w,y}": "p", "b": "q", "**": "r"})
print(s.to_svg(), s.to_html(), s.to_text())
"""

STATICS = """
from treeadapt.trees.metadata import _read
steps, *_ = _read([{"b", "a"}, {"x": [frozenset("xyz")]}])
print([step for step in steps if not isinstance(step[0], tuple)])
"""

MIGRATION = """
import numpy as np, treeadapt as ta
table = {
    "l.{i}.{n=q,k,v}.w : (h d) e": "{n}/w : e i h d",
    ("a.{x}", "b.{x}"): "c/{x}",
    "e : v e": (("f : v e", "g : v e"), {"cast": "float64", "pad": {"v": (0, 1)}}),
    "*.old": None,
}
m = ta.Migration(table, sizes={"h": 2, "d": 3})
leaves = {f"l.{i}.{n}.w": np.ones((6, 4)) for i in range(3) for n in "qkv"}
leaves |= {f"{n}.{x}": np.ones(2) for n in "ab" for x in "xyz"}
leaves |= {"e": np.ones((3, 4), "f4"), "m.old": np.ones(1)}
plan, found = m.plan(leaves), m(leaves)
back = {path: leaf for path, leaf in leaves.items() if path != "m.old"}
print(plan, plan.one_way, plan.unread, plan.result, list(found))
print(m.to_toml(), m, m.inverse, list(m.inverse(found, back)))
few = {path: leaf for path, leaf in leaves.items() if path not in ("a.x", "l.1.k.w")}
try:
    m({**few, "n": 1.0, "r": 2.0}, {"c/u": 1.0, "q/ww": np.ones(3), "f": np.ones(1)})
except ta.MigrationError as error:
    print(error)
"""

#: What each program prints, among other things.
PROGRAMS = {
    "paths": (LAW_9, "hidden/w"),
    "labels and errors": (RULES, "did you mean"),
    "partition": (PARTITION, "attn"),
    "pictures": (PICTURES, "<svg"),
    "migration": (MIGRATION, "without 'l.1.k.w'"),
    "statics": (STATICS, "<class 'dict'>"),
}


@pytest.fixture(scope="module")
def printed():
    """What each program printed, for each seed."""
    programs = {name: program for name, (program, _) in PROGRAMS.items()}
    given = json.dumps(programs | {"orders": ORDERS})
    path = os.pathsep.join((str(HERE), str(HERE.parent)))
    found = []
    for seed in SEEDS:
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            input=given,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found


def test_the_seeds_give_sets_different_orders(printed):
    one, two = (found["orders"].split(" frozenset") for found in printed)
    assert one[0] != two[0]
    assert one[1] != two[1]


@pytest.mark.hazard("H16", "H17")
@pytest.mark.parametrize("name", PROGRAMS)
def test_law_9_nothing_depends_on_the_hash_seed(printed, name):
    one, two = (found[name] for found in printed)
    assert one == two
    assert PROGRAMS[name][1] in one
