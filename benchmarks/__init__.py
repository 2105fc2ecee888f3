"""What tree conversion costs: one module for each topic, on one small harness."""
