"""Drafts: the first version of a migration, from what is known of both sides.

``draft`` has the function, and the order of evidence: what numbers show, then what
names propose. ``inputs`` reads both sides, ``called_function`` calls a function.
``evidence`` looks for numbers: ``numbers`` finds each number of the target in the
source, ``mixed_radix`` factors such a map of indices into axes, ``values`` and
``parts`` make rows of it, which ``trying`` tries. ``pairing`` proposes rows from names
and shapes, with ``synonyms``, ``families`` of leaves that differ in numbers, ``fused``
arrays and the orders of axes in ``shapes``. ``stated`` reads ``config.json``. ``rows``
holds what a row says before its axes have names, ``merging`` unites rows, ``writing``
names and writes them, ``factors`` says what a factor follows from, ``ordering`` lets
each take its leaves, ``finishing`` makes the table, and ``migration_draft`` is the
result.
"""
