"""From a file to an optimizer: tables that say what trains each label.

``load`` is the face, ``factories`` knows what may be built, ``building`` builds it, and
``checks`` holds it against a tree.
"""
