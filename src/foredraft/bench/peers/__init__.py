"""Other engines beside this one: the same weights and token ids, each in a process and an environment of its own."""
