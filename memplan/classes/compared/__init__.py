"""Pictures compared with texts, and the towers that do it."""
