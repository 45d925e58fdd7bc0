"""The measurements, one a file, in the order of the report; each has ``measure(bench) -> Result``."""
