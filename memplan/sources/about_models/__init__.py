"""What is known of a model, by name or in its files, before its config is read into a specification."""
