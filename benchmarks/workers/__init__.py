"""The processes of a race. Those of other engines run where this package is not: they import the standard library,
their engine and their neighbours in this folder alone."""
