"""The shape of a model: what ``graph`` turns into operations and ``sources`` reads from files."""
