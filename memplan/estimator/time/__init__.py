"""How long a step and a run take, and what they cost."""
