"""Searches for the fastest settings of drafters."""
