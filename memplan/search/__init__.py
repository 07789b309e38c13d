"""Many questions: grids of setups, and the search for the right one."""
