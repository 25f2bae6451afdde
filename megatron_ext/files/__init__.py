"""Formats: files read and checked, and written whole or not at all."""
