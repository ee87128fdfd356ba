"""Small stream processors, from one that counts to five that work together. `README.md` says what each shows."""
