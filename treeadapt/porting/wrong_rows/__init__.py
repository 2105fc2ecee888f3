"""Which row of a migration makes the answers of two models differ."""
