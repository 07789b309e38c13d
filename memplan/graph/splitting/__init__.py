"""A model split over a tensor-parallel group: which parts, and the collectives where they begin and end."""
