"""Answers for scripts: documents, rows, and what each name in them means."""
