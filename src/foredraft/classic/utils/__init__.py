"""Processors, cache pruning and the debug display of the classic interface."""
