"""Models of pictures as their classes (transformers 5.23)."""
