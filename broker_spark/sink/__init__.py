"""The sink that publishes rows."""
