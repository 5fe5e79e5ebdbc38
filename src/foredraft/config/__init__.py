"""Options as data: what may be asked for, in which range, and what it is called elsewhere. Imports no torch."""
