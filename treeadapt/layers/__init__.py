"""Layers inside an array: which arrays hold some, and what a part of one is called."""
