"""Benchmarks of methods: interleaved runs, equality of tokens before speed, measured costs."""
