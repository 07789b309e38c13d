"""Where answers are drawn: the console, and tables and words laid out on it."""
