"""Training a drafter on the target's own text."""
