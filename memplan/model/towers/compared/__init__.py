"""What towers' outputs are compared with, and what reads them, as data."""
