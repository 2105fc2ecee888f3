"""Which leaves: selectors say yes or no, rules say which value."""
