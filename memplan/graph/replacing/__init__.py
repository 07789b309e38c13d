"""What is put in the place of a module's own operations: adapters, trained prompts, packed weights."""
