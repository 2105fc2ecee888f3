"""Optax on any tree.

``adapt`` runs a transformation on the flat view of whatever tree it is given;
``partition`` and ``freeze`` are transformations of that flat view, adapted.
"""
