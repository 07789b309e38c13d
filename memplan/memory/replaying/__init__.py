"""The ledger of a run, and torch's caching allocator that it is replayed through."""
