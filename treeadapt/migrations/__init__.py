"""Migrations: the same numbers under other names and with other axes."""
