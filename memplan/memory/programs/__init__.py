"""What each engine asks the allocator for in a run, in its order: programs over one ledger."""
