"""Plans as people and scripts read them."""
