"""Adapters: one file per library, each a short table of ``Adapter`` rows.

The registry loads a library's file only once that library has been imported by
somebody else, so importing treeadapt imports none of them.
"""
