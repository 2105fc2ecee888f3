"""Entry point for installers that want a ``setup.py``; see ``setup.cfg``."""

from setuptools import setup

setup()
