"""Everything that enqueues."""
