// How results of the site's search are weighed: Sphinx' numbers, and an answer to ties.
// Of two pages with one score Sphinx shows the first by alphabet; here guides come before
// recipes, these before pages of facts, and the changelog is last.
"use strict";

var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    const folders = [
      [/^(index|quickstart|tutorial|sharding|reports|patterns|selectors-and-rules)$/, 0.9],
      [/^recipes\//, 0.8],
      [/^libraries\//, 0.7],
      [/^(changelog|versions)$/, 0.0],
      [/^(hazards|design|compatibility|benchmarks|examples)(\/|$)/, 0.1],
      [/^(reliability|upstream|security|evidence)$/, 0.1],
    ];
    const found = folders.find(([pattern]) => pattern.test(page));
    return score + (found ? found[1] : 0.5);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
