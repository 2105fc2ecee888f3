"""``partition`` as the optimizer of loops that nobody here wrote.

The programs are the sections of the pages in ``docs/libraries/loops``. Each prints what
its page shows; frozen leaves keep their bits, groups give the bits of Optax itself, a
misspelt rule never starts to train, and the state goes to a file and back into the
loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from loop import SECTIONS, Section, Watched
from test_pages import REPOSITORY, run_page

import treeadapt as ta


class Program(NamedTuple):
    """A section of a page, which runs after the start of that page.

    Attributes:
        page: its place in the repository.
        text: the start and the section, at the lines that they have in the page.
    """

    page: str
    text: str


def programs() -> dict[str, Program]:
    """Return the programs of all pages, by the title of the section."""
    by_title = {}
    for file in sorted((REPOSITORY / "docs" / "libraries" / "loops").glob("*.md")):
        start, *sections = re.split(
            r"^(?=## )", file.read_text("utf-8"), flags=re.MULTILINE
        )
        line = 0
        for section in sections:
            text = start + "\n" * line + section
            line += section.count("\n")
            title = section.partition("\n")[0].removeprefix("## ")
            page = str(file.relative_to(REPOSITORY))
            by_title[title] = Program(page, text)
    return by_title


PROGRAMS = programs()


class Run(NamedTuple):
    """What one run of a loop with ``partition`` left.

    Attributes:
        section: what it must do.
        page: the names of the program.
        first: the params that the optimizer was shown.
        trained: those that the loop gave back.
        state: the optimizer's last state.
        steps: how many updates there were.
    """

    section: Section
    page: Any
    first: Any
    trained: Any
    state: Any
    steps: int


@pytest.fixture(scope="class")
def run(request) -> Iterator[Run]:
    section = SECTIONS[request.cls.name]
    for library in section.needs:
        try:
            version(library)
        except PackageNotFoundError:
            pytest.skip(f"{library} is NOT INSTALLED")
    program = PROGRAMS[request.cls.name]
    wide = jax.config.jax_enable_x64  # importing NetKet switches it on
    with pytest.MonkeyPatch.context() as monkeypatch:
        page = run_page(*program, monkeypatch)
        watched = Watched(ta.partition(page.groups, page.rules))
        trained = page.train(watched.tx)
        jax.effects_barrier()
        yield Run(section, page, watched.first, trained, watched.state, watched.steps)
    jax.config.update("jax_enable_x64", wide)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in ta.to_flat_dict(tree).items()}


def bits(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        path: (str(array.dtype), array.shape, array.tobytes())
        for path, array in arrays(tree).items()
    }


class Laws:
    """What holds for each loop.

    Attributes:
        name: its section.
    """

    name: str

    def test_frozen_leaves_keep_their_bits_and_all_others_move(self, run):
        first, trained = arrays(run.first), arrays(run.trained)
        assert run.steps > 1
        assert trained.keys() == first.keys() >= run.section.still.keys()
        for path, before in first.items():
            changed = before != trained[path]
            still = np.zeros(before.shape, bool)
            if path in run.section.still:
                still[run.section.still[path]] = True
            assert before[still].tobytes() == trained[path][still].tobytes(), path
            assert still.all() or changed[~still].any(), path

    def test_groups_give_the_bits_of_optax_itself(self, run):
        theirs = run.page.train(run.section.theirs(run.page.groups))
        assert bits(run.trained) == bits(theirs)

    def test_a_misspelt_rule_never_starts_to_train(self, run):
        table = {run.section.misspelt: "frozen", **dict(run.page.rules.pairs)}
        rules = ta.Rules(table, **run.page.rules.options)
        watched = Watched(ta.partition(run.page.groups, rules))
        with pytest.raises(ta.UnusedRuleError, match=re.escape(run.section.misspelt)):
            run.page.train(watched.tx)
        assert watched.steps == 0

    def test_the_state_goes_to_a_file_and_back_into_the_loop(self, run, tmp_path):
        tx = ta.partition(run.page.groups, run.page.rules)
        ta.save(tmp_path / run.section.file, run.state)
        target = jax.eval_shape(tx.init, run.first)
        state = ta.load(tmp_path / run.section.file, target)
        assert jax.tree.structure(state) == jax.tree.structure(run.state)
        assert bits(state) == bits(run.state)
        resumed = tx._replace(init=lambda _: state)
        assert bits(run.page.train(resumed)) != bits(run.trained)


# A worker takes a whole class, and imports the libraries of that one.
class TestOptimistix(Laws):
    name = "Optimistix and diffrax"


class TestSbx(Laws):
    name = "sbx"


class TestPpo(Laws):
    name = "A whole `ppo.train`"


class TestTunix(Laws):
    name = "Tunix"


class TestDynamax(Laws):
    name = "Dynamax"


class TestNetKet(Laws):
    name = "NetKet"


class TestNumPyro(Laws):
    name = "NumPyro"


class TestFlowJAX(Laws):
    name = "FlowJAX"


class TestGPJax(Laws):
    name = "GPJax"


class TestBrax(Laws):
    name = "Brax"


class TestBlackJAX(Laws):
    name = "BlackJAX"


def test_every_program_of_the_pages_is_here():
    laws = {laws.name for laws in Laws.__subclasses__()}
    assert PROGRAMS.keys() == SECTIONS.keys() == laws
