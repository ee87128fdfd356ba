"""Example programs. Run them from the top of the repository."""
