"""What people read of trees: summaries, differences, memory, and pictures.

``summary`` says what rules decide on a tree, ``diff`` how two trees differ, and
``memory`` what each device of a mesh would hold. The other files draw leaves that have
a name, a size and a label, and know neither arrays nor rules: ``outline`` folds a tree
to what a reader can take in, ``palette`` gives labels their colors, ``words`` writes
sizes and names, ``layout`` places them, and ``text``, ``svg`` and ``html`` paint.
"""
