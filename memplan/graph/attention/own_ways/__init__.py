"""Attention of classes that go a way of their own."""
