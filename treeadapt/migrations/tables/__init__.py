"""Migrations from the names of published weights to those of other libraries."""
