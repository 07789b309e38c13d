"""Parts of the reader of verl's files: its trainers for SFT, its engines, and the job around the actor."""
