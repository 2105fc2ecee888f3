"""What gemma makes of the tiny models: params of its own modules.

Its checkpoints have another layout, flat, for which it has no reader of the hub's
names: ``tunix.py`` holds that one to the reader of Tunix. From there its own functions
lead to the layout of its modules. One file of it needs no more than Flax.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
spec = importlib.util.find_spec("gemma")
for name in ("gemma", "gemma.gm", "gemma.gm.typing", "gemma.gm.ckpts"):
    module = types.ModuleType(name)
    parts = name.split(".")[1:]
    module.__path__ = [str(Path(spec.submodule_search_locations[0], *parts))]
    sys.modules[name] = module
sys.modules["gemma.gm.typing._common"] = types.SimpleNamespace(Params=Any)
sys.path.append(str(Path(__file__).parent))

from common import flat, gemma_checkpoint, report, weights_of  # noqa: E402
from gemma.gm.ckpts import _compat  # noqa: E402


def convert(_: str, folder: Path) -> dict[str, Any]:
    """Return the params of the library's modules."""
    checkpoint = gemma_checkpoint(weights_of(folder))
    nested = _compat.nest_params(_compat.param_remapper(checkpoint))
    return flat(nested["transformer"])


if __name__ == "__main__":
    report("gemma", ["gemma3_text"], convert)
