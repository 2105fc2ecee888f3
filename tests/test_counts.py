"""How many layers and experts ``config.json`` says that there are, and sizes once.

A folder that lost a layer loads without a word where no model is given, unless what its
configuration says is compared.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from command import invoke

import treeadapt as ta

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY / ".ci" / "oracles"))
from common import FOLDER, config_of, weights_of  # noqa: E402

TABLES = {
    (folder.name, file.stem): file.read_text("utf-8")
    for folder in (REPOSITORY / "treeadapt" / "migrations" / "tables").iterdir()
    for file in folder.glob("*.toml")
}


def published(tmp_path, weights, config, name="published"):
    """A folder as transformers writes it."""
    ta.save(tmp_path / name, weights, max_shard_bytes=1_000_000)
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path / name


def last_layer(weights):
    """What the names of the last layer have: those with the largest number."""
    numbers = [
        int(part) for name in weights for part in name.split(".") if part.isdigit()
    ]
    return f".{max(numbers)}."


@pytest.mark.parametrize(
    ("layout", "model_type"),
    # The configuration of openpi does not say how many layers there are.
    [table for table in TABLES if table[0] != "openpi"],
)
def test_every_table_knows_how_many_layers_there_should_be(layout, model_type):
    folder = FOLDER / model_type / "1"
    config = json.loads((folder / "config.json").read_text())
    # Some models have tables of their own, which are named outright.
    is_found = config["model_type"] == model_type
    name = layout if is_found else f"{layout}/{model_type}"
    m = ta.load_migration(name, config=folder)
    counts = [count for table in m.tables for count in table.counts]
    assert counts
    assert all(count.number for count in counts)
    assert f"{layout}/{model_type}" in m.origin


QWEN = FOLDER / "qwen3_moe" / "1"


def cut(kind):
    """Weights of a tiny model without some, and what an error says of them."""
    weights = weights_of(QWEN)
    at = {
        "last layer": ".layers.1.",
        "first layer": ".layers.0.",
        "last expert": ".experts.4.",
    }[kind]
    return {name: leaf for name, leaf in weights.items() if at not in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("last layer", "num_hidden_layers is 2, and the file has 1 layer: 0[.]"),
        ("first layer", "num_hidden_layers is 2, and the file has 1 layer: 1[.]"),
        ("last expert", "num_experts is 5, and the file has 4 experts: 0, 1, 2, 3[.]"),
    ],
)
def test_a_folder_that_lost_a_part_is_an_error_or_a_warning(tmp_path, kind, told):
    folder = published(tmp_path, cut(kind), config_of(QWEN))
    with pytest.raises(ta.MigrationError, match=told):
        ta.load(folder, migration="tunix")
    with pytest.warns(ta.TreeAdaptWarning, match=told):
        tree = ta.load(folder, migration="tunix", strict=False)
    result = invoke("convert", folder, tmp_path / "new", "--migration", "tunix")
    assert result.exit_code == 2
    assert "than its configuration says" in result.output
    # With a target that was made of it, too.
    with pytest.raises(ta.MigrationError, match=told):
        ta.load(folder, tree, migration="tunix")
    report = ta.compare_checkpoint(folder, tree, migration="tunix")
    assert not report.fits
    assert len(report.miscounted) == 1
    assert f"By config.json {report.miscounted[0]}." in str(report)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("stages.3.", r"len\(depths\) is 4, and the file has 3 stages: 0, 1, 2;"),
        ("stages.3.layers.2.", r"depths\.3 is 3, and the file has 2 layers: 0, 1[.]"),
    ],
)
def test_a_list_counts_its_entries_and_each_of_them(tmp_path, lost, told):
    resnet = FOLDER / "resnet" / "1"
    weights = {k: v for k, v in weights_of(resnet).items() if lost not in k}
    folder = published(tmp_path, weights, config_of(resnet))
    with pytest.raises(ta.MigrationError, match=told):
        ta.load(folder, migration="flax")


def test_a_list_is_not_a_size(tmp_path):
    text = 'version = 1\n[config]\nh = "depths"\n[[rows]]\nfrom = "w"\nto = "v"\n'
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ta.MigrationError, match="integer above 0"):
        ta.load_migration(tmp_path / "own.toml", config={"depths": [3, 4]})


def test_layers_that_a_row_drops_are_not_said_to_be_missing_in_the_file(tmp_path):
    folder = published(tmp_path, weights_of(QWEN), config_of(QWEN))
    table = ta.load_migration("tunix", config=folder, rows={"model.layers.1.*": None})
    with pytest.raises(ta.MigrationError, match=r"and the rows take 1 layer: 0\."):
        ta.load(folder, migration=table)


@pytest.mark.parametrize(
    ("above", "seen"),
    [
        ("model.layers.", "2 layers"),
        ("encoder.layer.", "2 layers"),
        ("albert_layer_groups.", "2 groups"),
        ("h.", "2 numbers"),
        ("", "2 numbers"),
    ],
)
def test_what_is_counted_is_named_by_the_path(tmp_path, above, seen):
    weights = {f"{above}{n}.w": np.ones(2, "float32") for n in range(2)}
    folder = published(tmp_path, weights, {"n_layer": 3})
    (tmp_path / "own.toml").write_text(
        f'version = 1\n[[rows]]\nfrom = "{above}{{l}}.w"\nto = "w/{{l}}"\n'
        f'[counts]\n"{above}{{l}}.*" = "n_layer"\n'
    )
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(folder, migration=tmp_path / "own.toml")
    assert f"n_layer is 3, and the file has {seen}: 0, 1." in str(caught.value)


def test_the_cure_of_the_message_works(tmp_path):
    config = config_of(QWEN)
    folder = published(tmp_path, cut("last layer"), config)
    right = ta.load_migration("tunix", config={**config, "num_hidden_layers": 1})
    tree = ta.load(folder, migration=right)
    assert {*tree["layers"]} == {"0"}


@pytest.mark.slow
def test_a_part_of_a_folder_is_not_compared(tmp_path):
    config = config_of(QWEN)
    folder = published(tmp_path, cut("last layer"), config)
    assert ta.load(folder, migration="tunix", where="embedder")
    weights = weights_of(QWEN)
    ta.save(tmp_path / "two", weights, max_shard_bytes=9_000)
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    shard = sorted((tmp_path / "two").glob("*-of-*.safetensors"))[-1]
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(shard, migration="tunix")
    assert "than its configuration says" not in str(caught.value)


@pytest.mark.slow
def test_layers_that_rows_drop_do_not_count(tmp_path):
    folder = FOLDER / "deepseek_v3" / "1"
    weights, config = weights_of(folder), config_of(folder)
    last = last_layer({n: 0 for n in weights if ".experts." not in n})
    more = f".{config['num_hidden_layers']}."
    weights |= {n.replace(last, more): leaf for n, leaf in weights.items()}
    whole = published(tmp_path, weights, config)
    drop = {f"model.layers{more}*": None}
    rows = ta.load_migration("maxtext", config=whole, rows=drop)
    assert ta.load(whole, migration=rows)
    first = ta.Migration({**drop, "{rest:**}": "{rest}"})
    chain = first.then(ta.load_migration("maxtext", config=whole))
    assert ta.load(whole, migration=chain)


def test_without_a_configuration_nothing_is_compared_and_the_report_says_so(tmp_path):
    weights = cut("last layer")
    config = {k: v for k, v in config_of(QWEN).items() if k != "num_hidden_layers"}
    folder = published(tmp_path, weights, config)
    tree = ta.load(folder, migration="tunix")
    report = ta.compare_checkpoint(folder, tree, migration="tunix")
    assert report.fits
    assert report.uncounted == ("num_hidden_layers",)
    assert "No configuration says num_hidden_layers, which is not" in str(report)
    (folder / "config.json").unlink()
    report = ta.compare_checkpoint(folder, tree, migration="tunix/qwen3_moe")
    assert report.uncounted == ("num_hidden_layers", "num_experts")


# --- a table of one's own ---

OWN = """
version = 1
[config]
d = "head_dim"
[counts]
"{s=enc,dec}.{l}.*" = ["layers", "enc + dec"]
[[rows]]
from = "{s=enc,dec}.{l}.{n} : (h d)"
to = "{s}/{l}/{n} : h d"
"""


def own(tmp_path, text=OWN, config=None):
    file = tmp_path / "own.toml"
    file.write_text(text)
    return ta.load_migration(file, config=config)


def test_a_count_may_be_the_sum_of_two_keys(tmp_path):
    file = tmp_path / "model.safetensors"
    ta.save(file, {f"enc.{n}.w": np.ones(4) for n in range(5)})
    right = {"head_dim": 2, "enc": 3, "dec": 2}
    assert ta.load(file, migration=own(tmp_path, config=right))
    with pytest.raises(ta.MigrationError, match=r"enc \+ dec is 6"):
        ta.load(file, migration=own(tmp_path, config=right | {"dec": 3}))
    with pytest.raises(ta.MigrationError, match="layers is 4"):
        ta.load(file, migration=own(tmp_path, config=right | {"layers": 4}))
    with pytest.raises(ta.MigrationError, match=r"'enc \+ dec': 3 \+ 'x'"):
        own(tmp_path, config=right | {"dec": "x"})


@pytest.mark.parametrize(
    "line", ['"a.b.*" = "n"', '"{a}.{b}" = "n"', '"{x:**}/w" = "n"']
)
def test_a_path_that_counts_nothing_is_an_error(tmp_path, line):
    text = OWN.replace('"{s=enc,dec}.{l}.*" = ["layers", "enc + dec"]', line)
    with pytest.raises(ta.MigrationError, match="captures"):
        own(tmp_path, text)


def test_a_size_of_a_configuration_is_one_in_the_whole_table(tmp_path):
    rows = """
[[rows]]
from = "q : (h d) e"
to = "q : h d e"
sizes = { h = 3 }
[[rows]]
from = "k : (k d) e"
to = "k : k d e"
sizes = { k = 2 }
"""
    head = 'version = 1\n[config]\nd = "head_dim"\n'
    two = {"q": np.ones((24, 5)), "k": np.ones((8, 5))}
    m = own(tmp_path, head + rows)
    with pytest.raises(ta.MigrationError) as caught:
        m(two)
    told = "d is 8 in 'q' and 4 in 'k', and a model has one d: pass config=, or sizes="
    assert told in str(caught.value)
    assert m({**two, "k": np.ones((16, 5))})["k"].shape == (2, 8, 5)
    # As the message says, and where the table says that a row has a size of its own.
    with pytest.raises(ta.MigrationError, match="contradict"):
        own(tmp_path, head + rows, config={"head_dim": 8})(two)
    text = head + rows.replace("k = 2", "k = 2, d = 4")
    assert own(tmp_path, text)(two)["k"].shape == (2, 4, 5)
    # Names that are not in [config] are those of their rows.
    assert own(tmp_path, "version = 1\n" + rows)(two)["k"].shape == (2, 4, 5)


@pytest.mark.parametrize(
    ("config", "counts", "said"),
    [
        ('d = "head_dim"', "n_layers", ["has no 'n_layers', which [counts] has for"]),
        ('d = "head_dimm"', "n_layer", ["has no 'head_dimm', which [config] has for"]),
        ('d = "nothing_like_it"', "n_layer", []),
        ('d = ["head_dimm", "head_dim"]', ["layers", "n_layer"], []),
        ('d = "head_dim"', "text.n_layer", ["[counts] has for 'h.{l}.*', so that is"]),
        ('d = "text.head_din"', "n_layer", []),
    ],
)
def test_a_key_that_the_configuration_lacks_is_said(tmp_path, config, counts, said):
    weights = {f"h.{n}.w": np.ones((6, 2), "float32") for n in range(2)}
    stated = {
        "n_layer": 2,
        "head_dim": 3,
        "vision": {"head_dim": 9},
        "text": {"heads": 1},
    }
    folder = published(tmp_path, weights, stated)
    (tmp_path / "own.toml").write_text(
        f'version = 1\n[[rows]]\nfrom = "h.{{l}}.w : (h d) o"\nto = "w : l h d o"\n'
        f'[config]\n{config}\n[counts]\n"h.{{l}}.*" = {json.dumps(counts)}\n'
    )
    target = {"w": np.zeros((2, 2, 3, 2), "float32")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ta.load(folder, target, migration=tmp_path / "own.toml")
    texts = [str(each.message) for each in caught]
    assert len(texts) == len(said)
    for text, part in zip(texts, said, strict=True):
        assert part in text
        near = "head_dim" if "[config]" in text else "n_layer"
        assert text.endswith(f"Did you mean {near!r}?") != ("text." in text)
    ta.save(tmp_path / "target.safetensors", target)
    result = invoke(
        *("convert", folder, tmp_path / "new", "--migration", tmp_path / "own.toml"),
        *("--target", tmp_path / "target.safetensors"),
    )
    assert result.output.count("warning: ") == len(said), result.output
