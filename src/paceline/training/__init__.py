"""A whole training: what a rank's state is, and how it is saved and resumed."""
