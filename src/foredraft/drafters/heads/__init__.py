"""Drafters that use small networks over the target's own features."""
