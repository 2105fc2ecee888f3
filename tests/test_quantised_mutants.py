"""Damaged files of codes and scales: read as what they mean, or refused in words.

Each form of ``quantized`` with something changed: its parts and its configuration, or
the header of its file byte by byte. See ``docs/reliability.md`` for the counts.
"""

from __future__ import annotations

import json
import random
import time

import jax
import numpy as np
import pytest
from quantized import FORMS, NAMES, published, write

import treeadapt as ta

EVERY = sorted(FORMS)
ENDINGS = [
    *("a.weight_scale", "a.weight_scale_inv", "a.qzeros", "a.weight", "a.weight_shape"),
    *("a.g_idx", "a_blocks", "a.weight_packed", "a.weight_scale_2", "a.weight.absmax"),
]
STRANGE = [
    *(None, -1, 0, 2**63, "x", [], [0], [-1, 1], [2**40, 1], {}, {"a": 1}, 1.5, True),
]
#: Of an axis, a start or a stop.
NUMBERS = [0, 1, 2, 3, 7, 8, 24, 32, 128, 2**20, 2**31, 2**40, 2**62, 2**64, -1, 1.5]
SECONDS = 5.0  # of this process, for one file; the first load also imports
GROWTH = 65  # bytes that are made of each byte of a file, at most


def in_parts(form, draw):
    """A form with one part, one name or one field of its configuration changed."""
    parts, stated = dict(form.parts), json.loads(json.dumps(form.config))
    name = draw.choice([*parts])
    part, kind = parts[name], draw.randrange(6)
    if kind == 0:
        del parts[name]
    elif kind == 1:
        parts[draw.choice(ENDINGS)] = parts.pop(name)
    elif kind == 2:
        fits = [d for d in ("i1", "i4", "f4", "f2") if not part.nbytes % int(d[1])]
        data = np.frombuffer(part.tobytes(), np.uint8)
        parts[name] = data.view(draw.choice(fits))
    elif kind == 3:
        parts[name] = part.reshape(-1) if draw.random() < 0.5 else part[None]
    elif kind == 4:
        data = scrambled(part.tobytes(), draw)
        parts[name] = np.frombuffer(data, part.dtype).reshape(part.shape)
    elif stated:
        stated = restated(stated, draw)
    return form._replace(parts=parts, config=stated)


def scrambled(data, draw):
    changed = bytearray(data)
    for _ in range(3 * bool(data)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def restated(stated, draw):
    """A configuration with one field of its quantization changed."""
    fields = stated["quantization_config"]
    more = ["weight_block_size", "bits", "config_groups", "group_size", "desc_act"]
    more += ["version", "checkpoint_format", "quant_method", "format"]
    key = draw.choice([*fields, *more])
    return stated | {"quantization_config": fields | {key: draw.choice(STRANGE)}}


def in_header(form, draw):
    """The bytes of a file, whose header says something else of its data."""
    data = {name: part.tobytes() for name, part in form.parts.items()}
    shapes = {name: [*part.shape] for name, part in form.parts.items()}
    if draw.random() < 0.4:  # axes of any length, of which one is 0
        for name in draw.sample([*data], draw.randrange(1, len(data) + 1)):
            shapes[name] = [draw.choice(NUMBERS[1:12]) for _ in shapes[name] or [0]]
            shapes[name][draw.randrange(len(shapes[name]))], data[name] = 0, b""
    header, start = {}, 0
    for name, part in form.parts.items():
        stop = start + len(data[name])
        header[name] = {
            "dtype": NAMES[part.dtype.name],
            "shape": shapes[name],
            "data_offsets": [start, stop],
        }
        start = stop
    for _ in range(draw.randrange(3)):
        name, other, kind = (
            draw.choice([*data]),
            draw.choice([*data]),
            draw.randrange(6),
        )
        entry = header[name]
        if kind == 0:
            entry["shape"] = [*entry["shape"], 1]
            entry["shape"][draw.randrange(len(entry["shape"]))] = draw.choice(NUMBERS)
        elif kind == 1:
            entry["dtype"] = draw.choice([*NAMES.values(), "F4", "F6_E2M3", 3, None])
        elif kind == 2:
            entry["data_offsets"][draw.randrange(2)] = draw.choice(NUMBERS)
        elif kind == 3:
            header[name], header[other] = header[other], header[name]
        elif kind == 4:
            header[draw.choice(ENDINGS)] = dict(entry)
        else:
            texts = [{}, 3, None, {"treeadapt": "x"}, {"a.other": name}]
            header["__metadata__"] = draw.choice(texts)
    text = json.dumps(header).encode()
    if draw.random() < 0.2:
        text = scrambled(text, draw)
    return len(text).to_bytes(8, "little") + text + b"".join(data.values())


def load(folder):
    """Return leaves by path, or the error; both in bounded time and memory."""
    start = time.process_time()
    try:
        with np.errstate(all="ignore"):
            leaves = ta.to_flat_dict(ta.load(folder))
    except ta.TreeAdaptError as error:
        leaves = error
    assert time.process_time() - start < SECONDS
    if isinstance(leaves, ta.TreeAdaptError):
        assert len(str(leaves)) <= 4_000
        return leaves
    size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(leaves))
    assert size < GROWTH * (folder / "model.safetensors").stat().st_size
    return leaves


def write_config(folder, stated):
    (folder / "config.json").unlink(missing_ok=True)
    if stated is not None:
        (folder / "config.json").write_text(json.dumps(stated))


def has_same_bytes(form, other):
    """Whether two forms have parts of the same bytes and dtypes; shapes may differ."""
    pairs = [(form.parts[name], part) for name, part in other.parts.items()]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.slow
def test_a_changed_part_or_configuration_never_gives_another_number(tmp_path):
    draw, outcomes = random.Random(0), {True: 0, False: 0}
    forms = [published(name) for name in EVERY]
    load(write(tmp_path / "m", forms[0]))
    for number in range(1_020):
        form = forms[number % len(forms)]
        mutant = in_parts(form, draw)
        folder = write(tmp_path / "m", mutant)
        write_config(folder, mutant.config)
        leaves = load(folder)
        is_read = not isinstance(leaves, ta.TreeAdaptError)
        outcomes[is_read] += 1
        # What is read under its own name, in its own shape and dtype, is what it was.
        if (
            is_read
            and {*mutant.parts} <= {*form.parts}
            and has_same_bytes(form, mutant)
        ):
            for name, meant in form.meant.items():
                leaf = np.asarray(leaves.get(name))
                if (leaf.shape, leaf.dtype) == (meant.shape, meant.dtype):
                    assert leaf.tobytes() == meant.tobytes(), (number, name)
    assert min(outcomes.values()) > 200


@pytest.mark.slow
def test_a_changed_header_is_read_or_refused(tmp_path):
    draw, outcomes = random.Random(0), {True: 0, False: 0}
    forms = [published(name) for name in EVERY]
    folder = write(tmp_path / "m", forms[0])
    load(folder)
    for number in range(3_000):
        form = forms[number % len(forms)]
        (folder / "model.safetensors").write_bytes(in_header(form, draw))
        is_stated = form.config and draw.random() < 0.5
        write_config(folder, restated(form.config, draw) if is_stated else form.config)
        outcomes[not isinstance(load(folder), ta.TreeAdaptError)] += 1
    assert min(outcomes.values()) > 300


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gptq_v2", "checkpoint_format", {"a": 1}),
        ("awq", "version", 4),
        ("awq", "quant_method", ["awq"]),
    ],
)
def test_a_format_that_is_not_a_text_is_an_error(tmp_path, name, field, value):
    form = published(name)
    form.config["quantization_config"][field] = value
    with pytest.raises(ta.CheckpointError, match=f"as '{field}', which is not a text"):
        ta.load(write(tmp_path / "m", form))


def test_columns_that_are_of_several_bits_are_an_error(tmp_path):
    """Of a configuration with groups of 4 and of 8 bits; of 3 columns both fit."""
    form = published("int4_packed")
    groups = [{"weights": {"num_bits": bits, "symmetric": True}} for bits in (4, 8)]
    fields = form.config["quantization_config"]
    fields["config_groups"] = {str(n): each for n, each in enumerate(groups)}
    parts = form.parts | {
        "a.weight_packed": np.ones((20, 1), np.int32),
        "a.weight_scale": np.ones((20, 1), np.float16),
        "a.weight_shape": np.array([20, 3]),
    }
    with pytest.raises(ta.CheckpointError, match="may be of 8, 4, 2 bits"):
        ta.load(write(tmp_path / "m", form._replace(parts=parts)))


@pytest.mark.parametrize("scale", ["weight_scale_2", "weight_scale_of_tensor"])
def test_float8_next_to_a_scale_of_its_own_is_not_plain(tmp_path, scale):
    form = published("fp8_of_a_tensor_without_a_configuration")
    parts = {**form.parts, f"a.{scale}": form.parts["a.weight_scale"]}
    del parts["a.weight_scale"]
    with pytest.raises(ta.CheckpointError, match=f"'a.{scale}' is next to 'a.weight'"):
        ta.load(write(tmp_path / "m", form._replace(parts=parts)))
