"""Programs that show what the library is for; run them from the top of the repository."""
