"""Rows of the table of options, group by group."""
