"""Drafts: the first version of a migration, from what is known of both sides.

``draft`` has the function, ``migration_draft`` its result and the text. ``numbers``
finds where each number of the target is in the source, ``digits`` factors such a map of
indices into axes, ``values`` and ``parts`` make rows of it. ``words`` compares names,
``shapes`` lists the orders of axes that fit, ``families`` unites leaves that differ in
numbers, ``fused`` finds arrays that hold several, ``pairing`` decides for the whole
model at once. ``rows`` holds what a row says before its axes have names, ``merging``
unites rows, ``writing`` names and writes them, ``ordering`` lets each take its leaves.
"""
