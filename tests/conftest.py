"""Fixtures that several test files share."""

from fake_gcs import faults, gcs, gcs_address  # noqa: F401 - fixtures are found by their names
