"""What can be looked up without asking for an estimate: cards, models, FLOPs, published tables."""
