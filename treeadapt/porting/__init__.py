"""The workshop: what writes tables of a migration, and says which row is wrong.

The core runs tables; nothing of it imports a module of this folder.
"""
