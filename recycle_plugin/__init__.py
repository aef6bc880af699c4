"""Token Recycling: drafts from an adjacency matrix of recycled candidate tokens."""
