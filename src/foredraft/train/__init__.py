"""Training of learned drafters: examples, features of the target, losses, and a training loop that can be resumed."""
