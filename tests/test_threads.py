"""Threads: eight of them convert, label, split and register at once.

Runs in a separate process, which dumps its threads and exits if they deadlock. Every
operation checks its own answer, whatever the others do meanwhile.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from sizes import full

pytestmark = pytest.mark.slow

THREADS = 8
OPERATIONS = full(10_000, 1_000)  # of each thread
TIMEOUT_S = 240

PROGRAM = """
import faulthandler, sys
THREADS, OPERATIONS, TIMEOUT_S = map(int, sys.argv[1:])
faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)

import collections, dataclasses, random, threading, traceback
from typing import Any, NamedTuple
import jax.tree_util as jtu, numpy as np
import treeadapt as ta

sys.setswitchinterval(1e-4)
w, v = np.ones(2, np.float32), np.zeros(3, np.float32)

class Point(NamedTuple):
    w: Any
    b: Any

@dataclasses.dataclass
class Plain:
    w: Any
    b: Any

@jtu.register_pytree_node_class
class Pair:
    def __init__(self, one, two):
        self.one, self.two = one, two
    def tree_flatten(self):
        return (self.one, self.two), None
    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)

ta.register(Pair, fields=("w0", "b0"))

# ``n`` is different in every operation; ``k`` names one of 300 structures.

def convert(n, k):
    tree = {"a": [w] * (n % 7 + 1), k: Point(w, v)}
    flat = ta.to_flat_dict(tree)
    assert list(flat) == [f"a/{i}" for i in range(n % 7 + 1)] + [k + "/w", k + "/b"]
    again = ta.from_flat_dict(tree, flat)
    assert type(again[k]) is Point and again[k].w is w and again[k].b is v

def convert_opened(n, k):
    tree = Plain([w], {k: v})
    state = ta.to_state_dict(tree)
    assert state == {"w": {"0": w}, "b": {k: v}}
    assert ta.from_state_dict(tree, {**state, "w": {"0": v}}, strict=False).w == [v]

def convert_what_others_register(n, k):
    found = ta.tree_paths({k: 1.0, "pair": Pair(w, v)})
    one, two = (path[5:] for path in found if path.startswith("pair/"))
    assert (one[0], two[0], one[1:]) == ("w", "b", two[1:]), found

def label(n, k):
    tree = {"a": {"w": w, "b": w}, k: [w]}
    want = {"a": {"w": "rest", "b": n}, k: ["z"]}
    assert ta.param_labels(tree, {"**/b": n, k: "z", "**": "rest"}) == want

def mask(n, k):
    tree = {"a": {"w": w, "b": w}, k: (w,)}
    out = "wb"[n % 2]
    want = {"a": {"w": out != "w", "b": out != "b"}, k: (False,)}
    assert ta.param_mask(tree, ["**", "!a/" + out, ~ta.node(dict) & ~ta.glob("a"),
        f"!{k}"]) == want

def halves(n, k):
    tree = Point([w, n], {k: v, "f": len})
    params, rest = ta.split(tree, f"b/{k}")
    assert list(params) == [f"b/{k}"] and params[f"b/{k}"] is v
    again = ta.merge({f"b/{k}": n}, rest)
    assert type(again) is Point and again.w[0] is w and again.w[1] == n
    assert again.b == {k: n, "f": len}

def register_for_all(n, k):
    ta.register(Pair, fields=(f"w{n}", f"b{n}"))

def register_for_oneself(n, k):
    own = ta.default_registry.copy()
    own.register(Pair, fields=(f"x{n}", f"y{n}"))
    with own.use():
        assert ta.tree_paths(Pair(w, v)) == (f"x{n}", f"y{n}")
    assert f"x{n}" not in ta.tree_paths(Pair(w, v))

def new_classes(n, k):
    New = collections.namedtuple("New", f"a{n} b")
    Opened = dataclasses.make_dataclass("Opened", [f"c{n}"])
    want = (f"0/a{n}", "0/b", f"1/c{n}")
    assert ta.tree_paths([New(w, v), Opened(w)]) == want

def unsortable(n, k):
    try:
        ta.to_flat_dict({1: w, "a": w, k: w})
    except ta.PathError as error:
        assert "cannot sort" in str(error)
    else:
        raise AssertionError

def mismatch(n, k):
    try:
        ta.from_flat_dict({"a": w, k: w}, {"a": w})
    except ta.StructureMismatchError as error:
        assert repr(k) in str(error)
    else:
        raise AssertionError

SHARES = {
    convert: 30, convert_opened: 5, convert_what_others_register: 10, label: 20,
    mask: 10, halves: 20, mismatch: 2, unsortable: 1, new_classes: 0.3,
    register_for_oneself: 0.3, register_for_all: 0.3,
}
start = threading.Barrier(THREADS)
done = collections.Counter()
wrong = []

def work(thread):
    dice = random.Random(thread)
    plan = dice.choices(list(SHARES), SHARES.values(), k=OPERATIONS)
    start.wait()
    for step, operation in enumerate(plan):
        n = thread * OPERATIONS + step
        try:
            operation(n, f"z{dice.randrange(300)}")
        except Exception:
            wrong.append(traceback.format_exc())
            return
    done.update(operation.__name__ for operation in plan)

threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong[0]
assert len(done) == len(SHARES), done
assert len(ta.default_registry.entries) == 1 + done["register_for_all"]
print(done.total())
"""


@pytest.mark.hazard("H11", "H12")
def test_eight_threads_get_correct_answers_and_finish():
    arguments = [str(number) for number in (THREADS, OPERATIONS, TIMEOUT_S)]
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S + 60,
    )
    assert finished.returncode == 0, finished.stderr[-4_000:]
    assert int(finished.stdout) == THREADS * OPERATIONS
