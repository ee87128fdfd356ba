"""Real servers as small objects for the tests."""
