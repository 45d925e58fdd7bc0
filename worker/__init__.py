"""Everything that generates."""
