"""Searches for what makes drafters fast."""
