"""Models written out layer by layer from a specification: types that have no class yet."""
