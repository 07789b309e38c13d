"""Lists and ranges of whole numbers, as options take them."""

from memplan.search.ranges import MAX_DIGITS, MAX_VALUES, parse_range

__all__ = ["MAX_DIGITS", "MAX_VALUES", "parse_range"]
