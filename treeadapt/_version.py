"""The version, written here and nowhere else; ``setup.cfg`` reads it."""

__version__ = "0.4.0"
