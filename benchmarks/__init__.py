"""What tree conversion costs: one module a topic, on one small harness."""
