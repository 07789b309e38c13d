"""Many setups at once: which share their work, and which process takes them."""
