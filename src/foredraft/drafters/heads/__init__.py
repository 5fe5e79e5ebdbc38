"""Drafters that are small networks over the target's own features."""
