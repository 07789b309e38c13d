"""A plan: goals, degrees, floors, and the search that asks for the best first."""
