"""Training of learned drafters: examples, features of the target, losses, and the loop that keeps what it has done."""
