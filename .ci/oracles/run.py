"""Runs the libraries that tables are compared with, and says which digest changed.

An environment for each library, in ``.venv-oracles``; one that cannot be installed is
skipped with a line. ``--write`` writes the digests into the tables instead, the day of
that, and how far answers of both models are apart, or why they are not compared; these
are on their cards. ::

    python .ci/oracles/run.py [--write] [library ...]
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TABLES = REPOSITORY / "treeadapt" / "migrations" / "tables"
#: When each table was last compared, how far the answers were apart, or why not.
COMPARED = TABLES / "compared.toml"
#: Of arrays in codes and scales.
QUANTIZED = REPOSITORY / "tests" / "quantized.toml"
ENVIRONMENTS = REPOSITORY / ".venv-oracles"

#: What pip installs without what it depends on, and then with it.
LIBRARIES = {
    # All that its models import.
    "easydel": (
        ["easydel==0.3.0", "eformer==0.0.99.12", "ejkernel==0.0.78"],
        [
            *("jax==0.9.*", "flax==0.12.3", "transformers==5.5.*", "torch==2.13.0"),
            *("ray", "einops", "optax", "orbax-checkpoint", "safetensors", "jinja2"),
            *("msgspec==0.19.*", "jaxtyping", "beartype", "pydantic", "tqdm", "chex"),
            *("ml-collections", "plum-dispatch==2.3.2", "mergedeep", "tblib"),
            *("contextlib2", "google-cloud-storage", "braceexpand", "tensorstore"),
            *("fsspec<2026", "psutil", "pyyaml", "rich", "pyzmq", "fastapi", "uvicorn"),
            *("partial-json-parser", "cryptography", "zstandard", "grafanalib"),
            *("sentencepiece", "pillow", "datasets", "google-api-python-client"),
        ],
    ),
    "flax": ([], ["transformers==4.57.6", "flax<0.13", "jax<0.11"]),
    "gemma": (["gemma==4.0.1"], ["jax", "flax"]),
    "keras_hub": (
        ["keras-hub==0.32.0"],
        [
            *("keras", "jax", "safetensors", "regex", "rich", "kagglehub"),
            *("tokenizers", "sentencepiece"),
        ],
    ),
    # All that its models and its conversion import.
    "maxtext": (
        ["maxtext==0.2.5"],
        [
            *("jax", "flax", "optax", "safetensors", "orbax-checkpoint", "omegaconf"),
            *("pydantic", "packaging", "pathwaysutils", "jinja2", "qwix", "aqtp"),
            *("tokamax", "huggingface_hub", "transformers", "grain", "drjax"),
            *("pillow", "tiktoken", "sentencepiece", "sympy", "psutil"),
        ],
    ),
    # Not the libraries of a table: see ``quantized.py``.
    "quantized": (
        [],
        [
            *("torch==2.13.0", "transformers==5.24.0", "compressed-tensors==0.20.0"),
            *("bitsandbytes==0.50.2", "ml_dtypes", "numpy", "accelerate"),
        ],
    ),
    "openpi": ([], ["numpy"]),  # its formulas alone: see ``openpi.py``
    "tunix": (
        ["google-tunix==0.1.7"],
        [
            "jax",
            "flax",
            "safetensors",
            "jaxtyping",
            "einops",
            "huggingface_hub",
            "kagglehub",
            "gcsfs",
            "omegaconf",
            "sentencepiece",
        ],
    ),
}

NEWER = ("gemma", "maxtext")  # from Python 3.12 on
#: Those whose models are called.
CALLED = ("easydel", "flax", "gemma", "keras_hub", "maxtext", "tunix")
#: The environment that has transformers on PyTorch, with which answers are compared.
PYTORCH = "quantized"


def environment(library: str) -> Path | None:
    """Return the Python that has a library; None if it cannot be installed."""
    folder = ENVIRONMENTS / library
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    alone, others = LIBRARIES[library]
    pip = [python, "-m", "pip", "install", "--quiet"]
    steps = [[_base(library), "-m", "venv", "--clear", folder], [*pip, *others]]
    if alone:
        steps.insert(1, [*pip, "--no-deps", *alone])
    for step in steps:
        if subprocess.run(step, check=False).returncode:
            return None
    ready.touch()
    return python


def _base(library: str) -> str:
    """Return the Python that makes an environment; some libraries need a newer one."""
    if library not in NEWER:
        return sys.executable
    names = ("python3.14", "python3.13", "python3.12")
    known = os.environ.get("NEWEST_PYTHON", "")
    return known or next(filter(None, map(shutil.which, names)), sys.executable)


def printed(library: str, python: Path) -> list[str]:
    """Return the lines that the program of a library prints.

    Raises:
        RuntimeError: its program fails.
    """
    variables = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "HF_HUB_OFFLINE": "1"}
    variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # what runs once is compiled once
    pytorch = environment(PYTORCH) if library in CALLED else None
    if pytorch is not None:
        variables["PYTORCH"] = str(pytorch)
    done = subprocess.run(
        [python, HERE / f"{library}.py"],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{library}.py fails; see above.")
    return done.stdout.splitlines()


def digests(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the digests of what a library makes, by table and tiny model."""
    by_table: dict[str, dict[str, str]] = {}
    for line in lines:
        if match := re.fullmatch(r"quantized (\w+) ([0-9a-f]{64})", line):
            by_table.setdefault("quantized", {})[match[1]] = match[2]
        elif match := re.fullmatch(r"([\w-]+)/(\w+) (\S+) ([0-9a-f]{64})", line):
            name = table_of(match[1], match[2])
            by_table.setdefault(name, {})[match[3]] = match[4]
    return by_table


def answers(lines: Iterable[str]) -> dict[str, str]:
    """Return how far answers are apart, by table: those of its types farthest apart."""
    by_table: dict[str, list[tuple[float, str]]] = {}
    for line in lines:
        if match := re.fullmatch(r"([\w-]+)/(\w+) answers (([^\s,]+)(, .+)?)", line):
            name = table_of(match[1], match[2])
            by_table.setdefault(name, []).append((float(match[4]), match[3]))
    return {name: max(apart)[1] for name, apart in by_table.items()}


def reasons(lines: Iterable[str]) -> dict[str, str]:
    """Return why answers are not compared, by table."""
    matches = (re.fullmatch(r"([\w-]+)/(\w+) uncalled (.+)", line) for line in lines)
    return {table_of(match[1], match[2]): match[3] for match in matches if match}


def table_of(layout: str, model_type: str) -> str:
    """Return the name of the table of a model type."""
    for file in (TABLES / layout).glob("*.toml"):
        types = tomllib.loads(file.read_text("utf-8")).get("model_types", [file.stem])
        if model_type in types:
            return f"{layout}/{file.stem}"
    raise LookupError(f"No table of {layout} is for {model_type}.")


def stored(text: str) -> dict[str, str]:
    """Return the digests that a table has."""
    return dict(re.findall(r'^([\w-]+) = "([0-9a-f]{64})"$', text, re.MULTILINE))


_COMMENT = """\
# What transformers, compressed-tensors and bitsandbytes make of the forms in
# ``quantized.py``: ``make test-oracles ORACLES=quantized`` asks them again.
"""


def _lines(digests: dict[str, str]) -> str:
    return "".join(f'{name} = "{code}"\n' for name, code in sorted(digests.items()))


def write(file: Path, new: dict[str, str]) -> None:
    """Write digests into a table, above its first row and the comment of that."""
    text = re.sub(r"\n\[digests\]\n([^\n]+\n)+", "", file.read_text("utf-8"))
    place = re.search(r"\n(# [^\n]*\n)*\[\[(rows|tables)\]\]", text)
    assert place is not None
    start = place.start()
    file.write_text(f"{text[:start]}\n[digests]\n{_lines(new)}{text[start:]}", "utf-8")


def write_compared(tables: Iterable[str], day: str, lines: list[str]) -> None:
    """Write on which day tables were compared, and how far answers were apart.

    Args:
        tables: those that were compared.
        day: of the comparison.
        lines: that the program of a library printed.
    """
    text = COMPARED.read_text("utf-8")
    fields = tomllib.loads(text)
    apart, why_not = answers(lines), reasons(lines)
    new = {"answers": apart, "reasons": why_not}
    parts = {"days": fields["days"] | dict.fromkeys(tables, day)}
    for part, values in new.items():  # a table is in one of them
        kept = fields.get(part, {})
        kept = {k: it for k, it in kept.items() if k not in apart | why_not}
        parts[part] = kept | values
    blocks = [text.partition("[days]\n")[0].rstrip()]
    for part, values in parts.items():
        rows = [f'"{name}" = "{values[name]}"' for name in sorted(values)]
        blocks.append("\n".join([f"[{part}]", *rows]))
    COMPARED.write_text("\n\n".join(blocks) + "\n", "utf-8")


def main(arguments: list[str]) -> int:
    """Compare, or write; return 1 if something differs."""
    names = [each for each in arguments if not each.startswith("-")] or [*LIBRARIES]
    changed = 0
    for library in names:
        python = environment(library)
        if python is None:
            print(f"{library}: SKIPPED, pip cannot install it.", flush=True)
            continue
        try:
            lines = printed(library, python)
        except RuntimeError as error:
            print(f"{library}: {error}", flush=True)
            changed += 1
            continue
        by_table = digests(lines)
        if "--write" in arguments:
            today = datetime.date.today().isoformat()
            write_compared(by_table.keys() - {"quantized"}, today, lines)
        for table, new in by_table.items():
            file = QUANTIZED if table == "quantized" else TABLES / f"{table}.toml"
            if "--write" in arguments and table == "quantized":
                file.write_text(f"{_COMMENT}[digests]\n{_lines(new)}", "utf-8")
                continue
            if "--write" in arguments:
                write(file, stored(file.read_text("utf-8")) | new)
                continue
            old = stored(file.read_text("utf-8"))
            names_changed = [name for name in new if old.get(name) != new[name]]
            changed += len(names_changed)
            for name in names_changed:
                print(f"{table}: the digest of {name} changed.", flush=True)
        count = sum(map(len, by_table.values()))
        print(f"{library}: {count} digests of {len(by_table)} tables.", flush=True)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
