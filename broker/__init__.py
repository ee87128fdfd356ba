"""Write an application once, run it on any broker."""
