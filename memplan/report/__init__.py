"""Answers rendered: tables for people; JSON, CSV and Markdown for scripts."""
