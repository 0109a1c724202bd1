"""Configuration to compiled pipeline, and the places where it runs."""
