"""What was typed, before a command sees it: words, values, what goes unused."""
