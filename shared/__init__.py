"""What producers and workers agree on: the wire format, the keys, the broker and its scripts."""
