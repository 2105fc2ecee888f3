"""Pictures of a tree: as SVG, as HTML, as Markdown, and as lines of text.

``outline`` folds a tree to what a reader can take in, ``palette`` gives labels their
colours, and ``words`` writes sizes and names; the other files draw. They draw leaves
that have a name, a size and a label, and know neither arrays nor rules.
"""
