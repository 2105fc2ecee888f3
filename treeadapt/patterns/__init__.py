"""Patterns: one glob, and all of them at once, walked with the tree."""
