"""Try the search of the built site: ``python docs/scripts/check_search.py FOLDER``.

Runs the site's own JavaScript, with the index that Sphinx wrote, and says which page
comes first for what people type. A query whose page is not the first is an error, and
so is a page that ``llms.txt`` does not list.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import quickjs

# What people type -> the page that must come first.
QUERIES = {
    "huggingface": "recipes/published",
    "from_pretrained": "recipes/published",
    "learning rate per layer": "recipes/layer-wise-rates",
    "safetensors to flax": "recipes/published",
    "load pytorch weights": "recipes/published",
    "weight decay mask": "recipes/weight-decay",
    "freeze layers": "recipes/freezing",
    "shard": "sharding",
    "port a model": "recipes/porting",
    "pytorch to jax": "recipes/porting",
    "lora": "recipes/lora",
    "muon": "recipes/muon",
    "resume training": "recipes/optimizer-checkpoint",
    "logits differ": "recipes/drafting",
    "multi_transform": "selectors-and-rules",
    "match_partition_rules": "sharding",
    "rename parameters": "recipes/refactoring",
    "gradient norm": "recipes/watching",
    "param groups": "recipes/pytorch",
    "scan over layers": "recipes/scanned-layers",
}
# What the search asks of a browser, which it does not need for an answer.
BROWSER = """
var window = globalThis;
window.location = {search: ""};
window.setTimeout = () => 0;
var document = {
  getElementById: () => null,
  documentElement: {dataset: {}},
  addEventListener: () => null,
  createElement: () => ({}),
};
var DOCUMENTATION_OPTIONS = {};
var _ready = () => null;
var _ = (text) => text;
var SPHINX_HIGHLIGHT_ENABLED = false;
var localStorage = {setItem: () => null, getItem: () => null, removeItem: () => null};
"""
ASK = """
var ask = (query) => {
  const [text, words, without, marked, objects] = Search._parseQuery(query);
  const found = Search._performSearch(text, words, without, marked, objects);
  return JSON.stringify(found.map((result) => result[0]).reverse());
};
"""


def search_of(site: Path) -> quickjs.Context:
    """Load the search of a built site, without a browser."""
    context = quickjs.Context()
    context.eval(BROWSER)
    for name in ("searchtools.js", "language_data.js"):
        text = (site / "_static" / name).read_text("utf-8")
        context.eval(text.replace('"use strict";', ""))
    context.eval((site / "searchindex.js").read_text("utf-8"))
    context.eval(ASK)
    return context


def main(site: Path) -> int:
    """Print each query whose page does not come first."""
    search, wrong = search_of(site), 0
    for query, page in QUERIES.items():
        pages = json.loads(search.eval(f"ask({json.dumps(query)})"))
        if pages[:1] != [page]:
            wrong += 1
            print(f"{query!r}: {pages[:3]} come first, {page!r} must")
    print(f"search: {len(QUERIES) - wrong} of {len(QUERIES)} queries find it first")
    lines = (site / "llms.txt").read_text("utf-8").splitlines()
    listed = {line.partition("](")[2].partition(")")[0] for line in lines[2:]}
    sources = {str(file.relative_to(site)) for file in site.glob("_sources/**/*.txt")}
    for page in sorted(listed ^ sources):
        print(f"llms.txt and the pages differ: {page}")
    print(f"llms.txt: {len(listed & sources)} of {len(sources)} pages")
    return 1 if wrong or listed != sources else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
