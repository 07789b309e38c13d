"""Encoders of text: layers of BERT's kind that all share, and what sets each type apart."""
